"""Triton kernels, one module per module of ops; imported when an op first runs on CUDA.

``launch_NAME`` launches the op NAME on the current stream. It takes the op's arguments as a named
tuple, checked; the contract is the op's.
"""
