"""Attention by the kernel of this package."""

from __future__ import annotations

from typing import Any

import torch

from graphkit.attention.paged import PagedAttention
from graphkit.ops.paged_attention import paged_attention


class TritonAttention(PagedAttention):
    """One op per layer, ``graphkit::paged_attention``: Triton on CUDA, plain torch on the CPU."""

    def _attend(self, args: Any) -> torch.Tensor:
        return paged_attention(*args)
