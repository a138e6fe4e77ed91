"""Triton kernels, one module per op, imported only where CUDA is."""
