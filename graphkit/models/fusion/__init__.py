"""Replacement of modules by graphkit's ops where both compute the same.

No class is known by name. A forward over a few random tokens shows which modules call which
(``observation``). What a module may compute is then tried on random inputs (``agreement``): linear
layers of one input (``linears``), norms (``norms``), gated networks (``gates``) and attention over
rotated heads (``heads``). Modules of which nothing is confirmed stay as they are. Norms add the
residual stream (``residual``) and products in parts (``products``) that they normalise.
"""

from graphkit.models.fusion.fuse import fuse_modules

__all__ = ["fuse_modules"]
