"""Measurements and counts as frozen dataclasses that JSON holds. Needs no torch.

Tables, pages and pictures are made from these alone, so they need neither a GPU nor a model. A
record carries its schema number; a reader refuses a newer one.
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
