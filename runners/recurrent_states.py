"""What runs of texts need of the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class RecurrentStates(Protocol):
    """States of recurrent layers by request row; ``graphkit.RecurrentStatePool`` has these members.

    Attributes:
        width: Most rows of a request whose states a step keeps.
        device: Device of the states.
    """

    width: int
    device: torch.device

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return every buffer by name, [rows, ...]."""

    def reset(self, req_pool_indices: torch.Tensor) -> None:
        """Set the states of request rows, int64 [B], to those before any token."""

    def commit(self, req_pool_indices: torch.Tensor, nodes: torch.Tensor) -> None:
        """Keep the states behind row ``nodes[i]``, int64 [B], of each request's last step."""
