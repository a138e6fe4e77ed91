"""Is it right: searches for silently wrong replays, runs of a step and their comparison.

Read ``report.py`` first: it runs all audits of a target. An audit is one file, or one folder whose
``audit.py`` says what it varies. What it reports has a kind of ``finding_kinds`` and goes to an
``AuditLog``. Audits of memory work on a ``ReplayableGraph``, of a runner or of another program.

- ``runs``: one batch with and without its graph, and the first node at which two runs differ.
- ``host_objects``, ``attention_check``: what a capture asks, through ``runners/capture_checks.py``.
- ``foreign``: graphs that another program captures; it loads without torch.
- ``kit``: the same checks as assertions and a pytest plugin, public as ``graphkit.testing``.

Imports models, the engine and everything below them. Commands and ``testing`` import it.
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
