"""The sizes of a runner's buffers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING, TypeGuard

from graphkit.errors import ConfigError, short_repr

if TYPE_CHECKING:
    import torch

_MAX_INT = 2**31 - 1
"""Kernels index with int32."""
WORD_BITS = 32
"""Tokens of one word of a bitmask."""


def bitmask_words(vocab_size: int) -> int:
    """Return the words of a row of a bitmask."""
    return -(-vocab_size // WORD_BITS)


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or numpy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def require_int(owner: str, field: str, value: object, least: int = 1) -> None:
    """Check that a setting is an int from ``least`` to 2**31 - 1.

    Args:
        owner: Name of the class that the setting belongs to.
        field: Name of the setting.
        value: Its value.
        least: Smallest allowed value.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"{owner}.{field} must be an int >= {least}, got {short_repr(value)}.", field=field
        )
    if value > _MAX_INT:
        raise ConfigError(
            f"{owner}.{field} must be an int <= {_MAX_INT}, got {value}.", field=field
        )


def require_type(
    owner: str, field: str, value: object, types: type | tuple[type, ...], expected: str
) -> None:
    """Check the type of an argument.

    Args:
        owner: Name of the class or function that the argument belongs to.
        field: Name of the argument.
        value: Its value.
        types: Allowed types.
        expected: Description of them, such as ``a graphkit.SpecConfig``.

    Raises:
        ConfigError: It has another type.
    """
    if not isinstance(value, types):
        raise ConfigError(
            f"{owner}.{field} must be {expected}, got {short_repr(value)}.", field=field
        )


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Sizes of a runner's input buffers, fixed for its lifetime.

    Raises:
        ConfigError: A size is not an int from 1 to 2**31 - 1, or the dtype is not floating-point.

    Attributes:
        max_batch_size: Largest number of requests in a batch.
        max_context_len: Largest number of tokens of a request, draft tokens included.
        hidden_size: Width of the target's hidden states (H).
        vocab_size: Size of the target's vocabulary (V).
        dtype: Dtype of the hidden states, a floating-point ``torch.dtype``.
        page_size: Tokens per KV page.
        spec_hidden_size: Width of the hidden states that the draft model reads: 3 x H for EAGLE3,
            which reads three target layers. ``None`` means ``hidden_size``.
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
            is_omitted = value is None and field.default is None
            if field.name != "dtype" and not is_omitted:
                require_int("BufferSizes", field.name, value)
        # Only a torch.dtype has this attribute; config must not import torch to ask for the type.
        if getattr(self.dtype, "is_floating_point", None) is not True:
            raise ConfigError(
                "BufferSizes.dtype must be a floating-point torch.dtype, got "
                f"{short_repr(self.dtype)}.",
                field="dtype",
            )

    @property
    def max_pages(self) -> int:
        """Number of KV pages of the longest request."""
        return -(-self.max_context_len // self.page_size)
