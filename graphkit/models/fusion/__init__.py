"""Replacement of modules by graphkit's ops where both compute the same.

No class is known by name. A forward over a few random tokens shows which modules call which, and
whether another computation gives the same (``observation``): one product of linear layers of one
input (``linears``), norms and the products that they add up (``norms``), gated networks (``fuse``),
attention over rotated heads (``heads``), and routers of experts (``routers``). Modules of which
nothing is confirmed stay as they are.
"""

from graphkit.models.fusion.fuse import fuse_modules

__all__ = ["fuse_modules"]
