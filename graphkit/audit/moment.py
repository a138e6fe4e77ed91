"""Declared state and random numbers, to go back to."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Moment:
    """Declared state and random numbers as they are now. Holds a copy of them.

    Args:
        state: By name.
        device: Of the state.
        page_size: Rows of a KV pool that are the dummy's, whatever is in them.
    """

    def __init__(
        self, state: Mapping[str, torch.Tensor], device: torch.device, page_size: int
    ) -> None:
        self._state, self._device, self._page_size = state, device, page_size
        self._saved = {name: tensor.clone() for name, tensor in state.items()}
        self._random = torch.get_rng_state()
        self._on_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        """Let them be as they were."""
        for name, tensor in self._state.items():
            tensor.copy_(self._saved[name])
        torch.set_rng_state(self._random)
        if self._on_cuda is not None:
            torch.cuda.set_rng_state(self._on_cuda, self._device)

    def changed(self) -> list[str]:
        """Names of the state that is not as it was."""
        return [name for name, tensor in self._state.items() if self._is_changed(name, tensor)]

    def _is_changed(self, name: str, now: torch.Tensor) -> bool:
        saved = self._saved[name]
        if torch.equal(now, saved):
            return False
        differs = (now != saved) & ~(now.isnan() & saved.isnan())
        if now.ndim > 1:
            differs[: self._page_size] = False
        return bool(differs.any())
