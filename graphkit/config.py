"""Sizes that are fixed for the life of a runner."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from graphkit.errors import ConfigError

if TYPE_CHECKING:
    import torch


_MOST = 2**31 - 1
"""Kernels count in int32."""


def require_int(owner: str, field: str, value: object, least: int = 1) -> None:
    """Refuse anything but an int of at least ``least`` that int32 holds.

    Raises:
        ConfigError: naming ``owner.field`` and the value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{owner}.{field} must be an int >= {least}, got {value!r}.", field=field)
    if value > _MOST:
        raise ConfigError(f"{owner}.{field} must be an int <= {_MOST}, got {value}.", field=field)


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """How large the input buffers of a runner must be.

    Attributes:
        max_batch_size: Most requests in one batch.
        max_context_len: Most tokens of one request, drafts included.
        hidden_size: Width of the target's hidden states (H).
        vocab_size: Size of the target's vocabulary (V).
        dtype: Dtype of hidden states, a ``torch.dtype``.
        page_size: Tokens per KV page.
        spec_hidden_size: Width of the hidden states that feed the draft model; EAGLE3 feeds three
            target layers, so 3 x H. ``None`` means ``hidden_size``.
        draft_vocab_size: Size of a reduced draft vocabulary. ``None`` means ``vocab_size``.
    """

    max_batch_size: int
    max_context_len: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    page_size: int = 1
    spec_hidden_size: int | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            left_out = value is None and field.default is None
            if field.name != "dtype" and not left_out:
                require_int("BufferSizes", field.name, value)
        if type(self.dtype).__name__ != "dtype" or not hasattr(self.dtype, "is_floating_point"):
            raise ConfigError(
                f"BufferSizes.dtype must be a torch.dtype, got {self.dtype!r}.", field="dtype"
            )

    @property
    def max_pages(self) -> int:
        """Pages that the longest request takes."""
        return -(-self.max_context_len // self.page_size)
