from graphkit.audit.audit_log import AuditLog as AuditLog, Check as Check
from graphkit.audit.baseline import graph_hash as graph_hash
from graphkit.audit.loop import audit_loop as audit_loop
from graphkit.audit.ranks import merged_reports as merged_reports
from graphkit.audit.report import audit_target as audit_target, graph_baseline as graph_baseline
from graphkit.audit.shadow.watch import ShadowWatch as ShadowWatch
from graphkit.records.audit import AUDITS as AUDITS, Audit as Audit
