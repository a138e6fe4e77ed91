"""Paged KV pools, recurrent states, and the allocation of KV slots to requests."""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
