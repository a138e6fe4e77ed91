"""Typed inputs of each mode, and their memory. Imported as ``graphkit.buffers``.

A batch takes this path: ``inputs`` (the caller's arrays) -> ``writers`` -> ``mailbox`` (pinned
memory) -> the refresh op -> the arena in ``input_buffers`` -> ``view`` (the forward's inputs).
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
