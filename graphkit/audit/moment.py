"""Declared state and random numbers, to go back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphkit.audit.row_axes import RowAxis, RowsByKind, reserved_rows, row_axes, rows_of_batch


class Moment:
    """Declared state and random numbers as they are now. Holds a copy of them.

    Args:
        state: By name.
        device: Of the state.
        page_size: Slots of the first page, which is the dummy's.
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

    def changed(self, batch: Any) -> list[str]:
        """Names of the state that a batch left otherwise, rows of nobody's aside."""
        named = rows_of_batch(batch, self._page_size)
        return [name for name, now in self._state.items() if self._is_changed(name, now, named)]

    def _is_changed(self, name: str, now: torch.Tensor, named: RowsByKind) -> bool:
        saved, nobodys = self._saved[name], reserved_rows(self._page_size)
        if torch.equal(now, saved):
            return False
        ways = row_axes(now, self._page_size, named) or (RowAxis("batch", 0),)
        return all(bool(way.stray_rows(now, saved, nobodys).any()) for way in ways)
