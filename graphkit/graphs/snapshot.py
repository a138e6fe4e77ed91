"""Copies of state tensors and random generators, to restore after a run that changes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

import torch

from graphkit.config import require_type
from graphkit.errors import ConfigError


class StateSnapshot:
    """Copies of state tensors and of the random generators' states.

    As a context manager it restores them when its block ends, also after an error.

    Args:
        tensors: State by name.
        device: Device whose default random generator is saved beside the CPU's.
        restore_host: Called at the end of ``restore``; restores what the host holds.

    Attributes:
        tensors: The state tensors themselves, by name.
        saved: Their copies, by name.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        restore_host: Callable[[], None] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self.saved = {name: tensor.clone() for name, tensor in tensors.items()}
        self._device, self._restore_host = device, restore_host
        self._generators = _generator_states(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore tensors and random numbers. May be called again.

        Enqueues the copies on the current stream and does not wait for them.
        """
        for name, tensor in self.tensors.items():
            tensor.copy_(self.saved[name])
        torch.set_rng_state(self._generators[0])
        for state in self._generators[1:]:
            torch.cuda.set_rng_state(state, self._device)
        if self._restore_host is not None:
            self._restore_host()

    def drew_random_numbers(self) -> bool:
        """Return whether a random generator has advanced since the snapshot."""
        return not all(map(torch.equal, self._generators, _generator_states(self._device)))


def check_restorable(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state as a dict if a snapshot can restore every tensor.

    Raises:
        ConfigError: The state is not a mapping, or a value is not a tensor, an inference tensor, or
            expanded.
    """
    require_type("Runner", "mutable_state", state, Mapping, "tensors by name, or None")
    for name, tensor in state.items():
        problem = restore_problem(tensor)
        if problem:
            raise ConfigError(f"mutable_state {name!r} {problem}", field="mutable_state")
    return dict(state)


def restore_problem(tensor: object) -> str:
    """Return why a snapshot cannot restore a tensor, as part of a sentence; empty if it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"is of type {type(tensor).__name__}. Declare tensors."
    if tensor.is_inference():
        return (
            "was created under torch.inference_mode, so it cannot be restored. Create it outside."
        )
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded: its rows share memory. Declare the tensor that it is a view of."
    return ""


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    """Return the state of the CPU's default generator, and of the device's if it is CUDA."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
