"""Runners: one per forward mode. Imported as ``graphkit.runners``.

A batch takes this path: ``runner`` (the verbs) -> ``replayer`` (everything prepared for its size)
-> one mailbox entry, one graph launch, the live rows of the output.
``capture`` makes the graphs, and ``captured_graphs`` tells about them. ``dispatch`` says which
batches have no graph, and ``step`` runs them eagerly; the checks of both are those of the buffers.
The file of a mode contains what the mode computes around the user's forward, and overrides what
``mode_declaration`` lists. ``capture_checks`` is the one door to ``graphkit.audit``.
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
