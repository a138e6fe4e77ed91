"""Cases of replays with the outputs that they must have, and comparisons on the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphkit.runners import Output, Runner, StagedBatch
from graphkit.runners.targets import CaptureTarget

SOURCES = ("numpy arrays", "CPU tensors", "device tensors")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Case:
    """A batch, and the output that each of its replays must have.

    Attributes:
        runner: Captured.
        name: Describes the batch.
        batch: Live rows.
        expected: Bits of each field of the padded step's output.
    """

    runner: Runner[Any, Any]
    name: str
    batch: Any
    expected: dict[str, torch.Tensor]

    def stage(self) -> StagedBatch[Any]:
        """Claim an entry and write the batch into it."""
        staged = self.runner.stage(self.batch.batch_size, self.batch.num_tokens)
        for name, rows in vars(self.batch).items():
            if isinstance(rows, np.ndarray):
                getattr(staged, name)[:] = rows
            elif rows is not None:
                setattr(staged, name, rows)
        return staged


def case_of(target: CaptureTarget, runner: Runner[Any, Any], live: int, seed: int) -> Case:
    """Draw a batch of a live size and run it without a graph."""
    batch, source = target.batch(runner.mode, live, seed), SOURCES[seed % len(SOURCES)]
    if source != "numpy arrays":
        device = runner.device if source == "device tensors" else "cpu"
        for name, rows in vars(batch).items():
            if rows is not None:
                setattr(batch, name, torch.as_tensor(rows).to(device))
    padded = runner.run_padded(batch).clone().tensors()
    return Case(
        runner,
        f"{mode_name(target, runner)}, {live} live at {runner.table.fit(live)}, seed {seed} "
        f"({source})",
        batch,
        {name: bits(rows) for name, rows in padded.items()},
    )


def mode_name(target: CaptureTarget, runner: Runner[Any, Any]) -> str:
    """Return the mode and the shape of the drafts."""
    return f"{runner.mode.name} {'chain' if target.spec.topk == 1 else 'tree'}"


def bits(rows: torch.Tensor) -> torch.Tensor:
    """View numbers as integers, so that a NaN equals itself and 0 differs from -0."""
    return rows.view(INTEGERS[rows.element_size()])


class Comparisons:
    """Compares outputs on the device, and waits for the results of many at once.

    Args:
        device: Device of the outputs.
        at_once: Number of outputs between two waits.
        fields: Largest number of fields of an output.

    Attributes:
        ways: Outputs compared, by the way of the replay.
        sizes: Outputs compared, by live size.
        mismatches: The replay and field of each difference.
    """

    def __init__(self, device: torch.device, at_once: int, fields: int) -> None:
        self.ways, self.sizes = Counter[str](), Counter[int]()
        self.mismatches: list[str] = []
        self._differs = torch.zeros(at_once, fields, dtype=torch.bool, device=device)
        self._unread: list[tuple[Case, str]] = []

    def compare(self, case: Case, output: Output, way: str) -> None:
        """Enqueue the comparison of a replay's output."""
        differs, tensors = self._differs[len(self._unread)], output.tensors()
        assert tensors.keys() == case.expected.keys(), f"{case.name}: got {list(tensors)}"
        for index, (name, rows) in enumerate(tensors.items()):
            torch.any(bits(rows) != case.expected[name], out=differs[index])
        self._unread.append((case, way))
        self.ways[way] += 1
        self.sizes[case.batch.batch_size] += 1
        if len(self._unread) == len(self._differs):
            self.read()

    def read(self) -> None:
        """Wait for the device, and note the differences."""
        first = self.ways.total() - len(self._unread)
        for index, field in self._differs.nonzero().tolist():
            case, way = self._unread[index]
            name = list(case.expected)[field]
            self.mismatches.append(f"replay {first + index}, {way}: {case.name}: {name}")
        self._differs.zero_()
        self._unread.clear()
