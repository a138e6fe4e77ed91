"""Ops for draft trees, accepted tokens and KV slots.

Each is a function that calls one op of the dispatcher, ``torch.ops.graphkit.NAME``: a torch
reference on the CPU, Triton kernels of ``graphkit.ops.kernels`` on CUDA. None waits for the device;
all may be captured and compiled.
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
