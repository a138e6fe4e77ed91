"""Capture of functions as graphs, on CUDA or on the CPU, and inspection of graphs."""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
