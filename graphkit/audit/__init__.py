"""Is it right: searches for silently wrong replays, runs of a step and their comparison.

Read ``report.py`` first: it runs all audits of a target. An audit is one file, or one folder whose
``audit.py`` says what it varies. What it reports has a kind of ``finding_kinds`` and goes to an
``AuditLog``; what cannot be checked raises ``NotChecked``.

- ``replayable_graph``: a graph that can be replayed from one state, of a runner or of another
  program, and the addresses in it. Audits of memory work on it.
- ``runs``: one batch with and without its graph, and the first node at which two runs differ.
- ``recaptures``, ``canonical_nodes``, ``capture_differences``: captures of one step, compared.
- ``bits``: equal bits of tensors, and sums of them. Differences up to rounding are in
  ``runners/comparison``.
- ``row_axes``: rows of state that a batch may write.
- ``host_objects``: what a forward reaches on the host, for captures through
  ``runners/capture_checks.py``, which also leads to ``attention_check``.
- ``foreign``: graphs that another program captures; it loads without torch.
- ``kit``: the same checks as assertions and a pytest plugin, public as ``graphkit.testing``.

Imports models, the engine and everything below them. Commands and ``testing`` import it.
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
