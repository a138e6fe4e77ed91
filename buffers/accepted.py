"""How many tokens a verify accepted, counted with and without the bonus token.

Two numbers with two names, because one number with two meanings cost this field many an off-by-one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphkit.buffers.fields import Rows
from graphkit.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class AcceptedCounts:
    """The pair that draft-extend reads: ``num_accepted_tokens == num_accepted_drafts + 1``.

    Neither tensor is ever changed in place.

    Attributes:
        num_accepted_drafts: Draft tokens that passed verification, bonus excluded.
        num_accepted_tokens: The same and the bonus token.

    Shapes:
        both: [B] int32, tensors or numpy arrays.

    Raises:
        InputError: The pair has two shapes or contradicts itself. Values on a device are taken on
            trust, since reading them would wait for it.
    """

    num_accepted_drafts: Rows
    num_accepted_tokens: Rows

    def __post_init__(self) -> None:
        check_counts(self)

    @classmethod
    def from_drafts(cls, num_accepted_drafts: Rows) -> AcceptedCounts:
        """The pair from what the verify ops count: drafts alone."""
        return cls(num_accepted_drafts, num_accepted_drafts + 1)

    @classmethod
    def from_tokens(cls, num_accepted_tokens: Rows) -> AcceptedCounts:
        """The pair from lengths that include the bonus token."""
        return cls(num_accepted_tokens - 1, num_accepted_tokens)

    def fields(self) -> dict[str, Rows]:
        """The pair as keyword arguments of the draft-extend inputs."""
        return {
            "num_accepted_drafts": self.num_accepted_drafts,
            "num_accepted_tokens": self.num_accepted_tokens,
        }


def check_counts(batch: Any) -> None:
    """Refuse a batch whose two counts contradict each other, as far as the host can see them.

    Raises:
        InputError: They do.
    """
    drafts = host_rows(batch.num_accepted_drafts)
    tokens = host_rows(batch.num_accepted_tokens)
    if drafts is None or tokens is None:
        return
    if drafts.shape != tokens.shape or not np.array_equal(drafts + 1, tokens) or (drafts < 0).any():
        raise InputError(
            f"num_accepted_drafts is {drafts.tolist()} and num_accepted_tokens {tokens.tolist()}. "
            "Tokens are drafts + 1, the bonus token included: make the pair with AcceptedCounts.",
            field="num_accepted_tokens",
        )


def host_rows(value: Any) -> np.ndarray[Any, Any] | None:
    """A value that the host can read without waiting, as numpy; ``None`` if there is none."""
    if isinstance(value, torch.Tensor):
        return value.numpy() if value.is_cpu else None
    return value if isinstance(value, np.ndarray) else None
