"""Forward modes, algorithms and their widths. Needs no torch to import."""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
