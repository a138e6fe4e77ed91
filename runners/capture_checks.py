"""What the audits check at a capture, and the one door of the core to them.

The core walks no objects and runs no texts. ``graphkit.audit.host_objects`` and ``attention_check``
do, and load when a runner captures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from graphkit.graphs import CapturedGraph

if TYPE_CHECKING:
    from graphkit.records import Finding
    from graphkit.runners.ranks import RunnerGroup


class FrozenValues(Protocol):
    """The host numbers and tensors that a forward could read when it was captured."""

    def find(self, size: int) -> list[Finding]:
        """Return the numbers and tensors that have changed and that the graph of a size keeps."""

    def check(self, size: int) -> None:
        """Refuse a replay of a graph that keeps a number which has changed.

        Raises:
            ReplayError: Names the number or tensor, the node and its line.
        """


class HostObjects(Protocol):
    """The objects that a forward, or each of several, can reach."""

    def check_weights(self, device: torch.device) -> None:
        """Check that the weights are on the device of the runner, and note them before a capture.

        Raises:
            ConfigError: All of them are on other devices.
        """

    def frozen_values(self, runner: Any) -> FrozenValues:
        """Note what the forward can read, for a runner that has just captured it."""

    def held_weights(self) -> nn.Module | None:
        """Return the module that the forward holds, or several by name; ``None`` without any.

        Raises:
            ConfigError: One is in training mode.
        """

    def warn_of_side_outputs(self, label: str, graph: CapturedGraph) -> None:
        """Log a warning if the capture of a graph has left tensors in objects."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield path and tensor of what the forward can reach, also in objects of graphkit."""


def host_objects(forward: Any) -> HostObjects:
    """Return what a forward, or a sequence of forwards, can reach on the host."""
    # The only imports of the core from above: see tests/unit/test_layers.py.
    from graphkit.audit.host_objects import ForwardObjects

    return ForwardObjects(forward)


def check_attention(
    runner: Any, states: RecurrentStates | None = None, group: RunnerGroup | None = None
) -> None:
    """Compare trees and packed prefills of the attention of a runner with plain chains.

    Args:
        runner: Runner of TARGET_VERIFY or DECODE. Others are not compared.
        states: Recurrent states of the model.
        group: Ranks that all call this; ``None`` selects those of the runner.

    Raises:
        AttentionError: They differ by more than rounding, on any rank.
    """
    from graphkit.audit.attention_check import check_attention

    check_attention(runner, states, group)


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
