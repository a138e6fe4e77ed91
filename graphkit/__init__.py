"""CUDA graphs for every forward mode of speculative decoding, around a forward you wrote.

Public names load on first use, so that ``import graphkit`` and ``graphkit --help`` stay free of
torch.
"""

from __future__ import annotations

__version__ = "0.1.0"
