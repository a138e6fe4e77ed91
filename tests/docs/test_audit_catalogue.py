"""The page Audits describes every kind of finding and every audit, and no other."""

import re
from pathlib import Path

from graphkit.audit.finding_kinds import FindingKind
from graphkit.records.audit import Audit

PAGE = (Path(__file__).parents[2] / "docs" / "audits.md").read_text()


def test_every_kind_of_finding_is_in_the_catalogue():
    described = re.findall(r"^([a-z' -]+)\n: ", PAGE, re.MULTILINE)
    assert sorted(described) == sorted(FindingKind)


def test_every_audit_has_a_section():
    assert {*re.findall(r"^### ([a-z-]+): ", PAGE, re.MULTILINE)} == {*Audit}
