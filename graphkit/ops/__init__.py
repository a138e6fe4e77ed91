"""Operations that runners and attention backends put into graphs.

Each is one op for the dispatcher, with a readable torch reference here and a Triton kernel for
CUDA in ``kernels/``.
"""
