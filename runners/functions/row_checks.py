"""Whether rows of a function are independent, and whether its pad rows write into its state.

The function runs without a graph, on rows that the example does not have. One row stays the same
while the others change: its results must stay the same, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import torch

from graphkit.errors import ConfigError, OutputError
from graphkit.graphs import StateSnapshot
from graphkit.records import Mismatch
from graphkit.runners.comparison import PADDING_LEAKS, Rounding, first_difference
from graphkit.runners.functions.arguments import Arguments
from graphkit.runners.functions.results import Results
from graphkit.runners.functions.written_tensors import WrittenTensors


class Integers(IntEnum):
    """Where drawn integers and booleans come from.

    Only ``EXAMPLE`` keeps the numbers of a row together; the others may index out of range.
    """

    EXAMPLE = 0
    COLUMN = 1
    ARGUMENT = 2


class Floats(Enum):
    """Which part of their range in the example drawn floating-point numbers are in."""

    MIDDLE = -1 / 64, 1 / 64
    LOW = -1, -0.75
    HIGH = 0.75, 1
    ENDS = None
    """Both ends, so that the largest magnitude differs from that of the middle."""


class DrawnRows:
    """Draws rows of arguments.

    Args:
        arguments: The arguments.
        seed: Seed of the values.
        uses_example: Whether floating-point numbers are those of the example, too.
    """

    def __init__(self, arguments: Arguments, seed: int, uses_example: bool) -> None:
        self._arguments, self._uses_example = arguments, uses_example
        self._generator = torch.Generator().manual_seed(seed)

    def rows(
        self,
        indices: Sequence[int],
        floats: Floats,
        integers: Integers = Integers.EXAMPLE,
        *,
        negates: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return rows by argument.

        Args:
            indices: Rows of the example whose integers and booleans the rows have.
            floats: Where floating-point numbers are drawn from.
            integers: Draws integers and booleans from elsewhere.
            negates: Whether booleans of the example are negated.
        """
        rows = {}
        for key, example in self._arguments.example.items():
            if example.is_floating_point() and not self._uses_example:
                rows[key] = self._floats(example, len(indices), floats)
            elif example.is_floating_point() or integers is Integers.EXAMPLE:
                picked = example[list(indices)]
                rows[key] = ~picked if negates and example.dtype == torch.bool else picked
            else:
                rows[key] = self._integers(example, len(indices), integers)
        return rows

    def _floats(self, example: torch.Tensor, count: int, part: Floats) -> torch.Tensor:
        finite = example[example.isfinite()].double()
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
        if low == high:  # such as zeros or ones, which show nothing
            high = low + max(1.0, abs(low))
        drawn = self._drawn(count, example)
        if part.value is None:
            drawn = (2 * drawn - 1).sign() * (1 + self._drawn(count, example)) / 2
        else:
            begin, end = part.value
            drawn = begin + (end - begin) * drawn
        values = low / 2 + high / 2 + (high / 2 - low / 2) * drawn
        return values.to(example.device, example.dtype)

    def _integers(self, example: torch.Tensor, count: int, source: Integers) -> torch.Tensor:
        numbers = example.long().cpu()
        low, high = numbers.amin(0), numbers.amax(0)
        if source is Integers.ARGUMENT or example.dtype == torch.bool:
            least, most = numbers.min(), numbers.max()
            if least == most and int(least) in (0, 1):  # they show nothing, and are often flags
                least, most = torch.tensor(0), torch.tensor(1)
            low, high = least.expand_as(low), most.expand_as(high)
        span = (high - low + 1).double()
        drawn = (self._drawn(count, example) * span).long().minimum(high - low)
        return (low + drawn).to(example.device, example.dtype)

    def _drawn(self, count: int, example: torch.Tensor) -> torch.Tensor:
        """Return uniform numbers of [0, 1), a row per row."""
        shape = count, *example.shape[1:]
        return torch.rand(shape, generator=self._generator, dtype=torch.double)


_PARTS = (
    (Floats.MIDDLE, Floats.ENDS), (Floats.LOW, Floats.HIGH), (Floats.ENDS, Floats.MIDDLE),
    (Floats.HIGH, Floats.LOW),
)  # fmt: skip
"""Where the numbers of a row and of its batch are, and then those of the other rows.

Where a statistic of the batch limits its rows, only a row with larger numbers shows it.
"""
_MOST_ROWS = 4
"""Rows of the batches that the function runs on."""
_MOST_PLACES = 256
"""Rows of the example whose places pads must not have."""
_STATE_ULPS = 16
"""Rounding that is allowed between a row that is written alone and beside pads."""
_Rows = Mapping[str, torch.Tensor]
ROW_ADVICE = (
    "A row may depend on the same row of the arguments alone, and random numbers must be "
    "arguments. If this is rounding, pass a larger tolerance."
)
HOST_ADVICE = "Results must not depend on values that the host changes between calls"


@dataclass(frozen=True, slots=True, eq=False)
class RowChecks:
    """Runs of a function without a graph, each from the same state.

    Attributes:
        arguments: Its arguments.
        results: Its results.
        written: The tensors that it writes.
        rounding: Rounding that is allowed.
        device: Where it runs.
        largest: Largest batch that has pad rows; 1 if no batch has.
        has_pad_values: Whether the caller chose pad values.
    """

    arguments: Arguments
    results: Results
    written: WrittenTensors
    rounding: Rounding
    device: torch.device
    largest: int
    has_pad_values: bool

    def check(self) -> None:
        """Check that rows are independent, and that pads write nothing that rows of a batch have.

        Restores tensors and random numbers.

        Raises:
            ConfigError: Pad rows write into tensors that the function did not create.
            OutputError: The function is random, or a row depends on others.
        """
        with StateSnapshot({}, self.device), torch.no_grad():
            try:
                is_stable = self._check_repeats()
                if self.largest > 1:
                    self._check_pad_writes()
                    self._check_independence(is_stable)
            finally:
                self.written.restore()

    def _check_repeats(self) -> bool:
        """Run the same rows twice, and return whether the results are equal in all bits."""
        rows = self.arguments.example_rows(range(min(self.largest, self.arguments.num_rows)))
        count, random = len(next(iter(rows.values()))), StateSnapshot({}, self.device)
        first = self._run(rows, range(count))
        name = self.arguments.name
        if random.drew_random_numbers():
            raise OutputError(
                f"{name} draws random numbers, so that its results differ from call to call. "
                "Random numbers must be arguments; a module that draws them needs eval()."
            )
        second = self._run(rows, range(count))
        changed = first_difference(
            first, second, lambda row, _: row, self.rounding, self.rounding.most
        )
        if changed is not None:
            raise OutputError(
                f"{name}: two calls with the same arguments differ: row {changed.row} of "
                f"`{changed.field}` is {changed.expected}, then {changed.got}. {HOST_ADVICE}, and "
                "random numbers must be arguments."
            )
        return all(torch.equal(first[name], second[name]) for name in first)

    def _check_independence(self, is_stable: bool) -> None:
        """Change all rows of a batch but one."""
        states = bool(self.written.memory)  # rows that write must not share their places
        count = min(_MOST_ROWS, self.largest, self.arguments.num_rows if states else _MOST_ROWS)
        if count < 2:
            return
        for seed, (near, far) in enumerate(_PARTS):
            live = (count - 1) * (seed % 2)
            # The rows of the example whose integers and booleans the batch has.
            order = [(live + i) % self.arguments.num_rows for i in range(count)]
            draw = DrawnRows(self.arguments, seed, uses_example=False)
            base = draw.rows(order, near, negates=seed % 2 > 0)
            expected = self._accepted(base, live)
            if expected is None:  # it accepts the values of the example alone
                draw = DrawnRows(self.arguments, seed, uses_example=True)
                base = draw.rows(order, near)
                expected = self._run(base, [live])
            for rows in self._others(draw, order, live, far):
                changed = _with_row(rows, base, live)
                got = self._accepted(changed, live)
                wrong = None if got is None else self._differs(expected, got, is_stable)
                if wrong is not None:
                    raise OutputError(
                        f"{self.arguments.name}: {PADDING_LEAKS}: row {live} of `{wrong.field}` is "
                        f"{wrong.got} instead of {wrong.expected} with other values of "
                        f"{self._followed(base, changed, live)} in the other rows. "
                        f"{ROW_ADVICE}"
                    )

    def _others(
        self, draw: DrawnRows, order: Sequence[int], live: int, far: Floats
    ) -> Iterator[_Rows]:
        """Yield batches with values that differ from those of the first batch."""
        others = [row for place, row in enumerate(order) if place != live]
        others = [*others[1:], others[0]]  # a permutation: rows that write need their own places
        others.insert(live, order[live])
        yield draw.rows(others, far)
        yield self._pads(len(order))
        if not self.written.memory:
            # An index that is out of range raises on the CPU, but ends the process on CUDA.
            examples = self.arguments.example.values()
            may_vary = any(not rows.is_floating_point() for rows in examples)
            if may_vary and self.device.type == "cpu":
                for source in (Integers.COLUMN, Integers.ARGUMENT):
                    yield draw.rows(others, far, source)

    def _followed(self, base: _Rows, changed: _Rows, live: int) -> str:
        """Return the first argument whose values in other rows a row of the results follows."""
        expected = self._run(base, [live])
        for key in base:
            got = self._accepted({**base, key: changed[key]}, live)
            if got is not None and self._differs(expected, got, True) is not None:
                return f"argument `{key}`"
        return "several arguments"

    def _differs(self, expected: _Rows, got: _Rows, is_stable: bool) -> Mismatch | None:
        ulps = self.rounding.beside(0.0)

        def allowed(field: torch.Tensor) -> torch.Tensor:
            # Relative to this row: its kernels have the same shapes in both runs.
            size = torch.where(field.isfinite(), field, 0).double().abs().max()
            eps = torch.finfo(self.rounding.coarser_dtype(field)).eps
            return torch.full_like(field, ulps * eps, dtype=torch.double) * size

        limit = allowed if is_stable else self.rounding.most  # sums in changing order differ more
        return first_difference(expected, got, lambda row, _: row, self.rounding, limit)

    def _check_pad_writes(self) -> None:
        """Compare what rows of the example write with what they write beside pad rows."""
        written, count = self.written, min(_MOST_ROWS, self.arguments.num_rows)
        if not written.memory:
            return
        draw = DrawnRows(self.arguments, 0, uses_example=False)
        if self._accepted(draw.rows([0], Floats.ENDS), 0) is None:
            draw = DrawnRows(self.arguments, 0, uses_example=True)
        batches = [draw.rows([i], Floats.ENDS) for i in range(count)]
        pads = self._pads(min(self.largest, _MOST_ROWS) - 1)
        fill = self._fill(batches[0])
        alone = []
        for rows in batches:
            places = self._writes(rows, fill)
            alone.append({key: (at, written.memory[key][at]) for key, at in places.items()})
        # Pads may be in the place of any row of the example, not only of the rows above.
        rest = range(count, min(self.arguments.num_rows, _MOST_PLACES), _MOST_ROWS)
        chunks = [range(i, min(i + _MOST_ROWS, self.arguments.num_rows)) for i in rest]
        further = [self._writes(draw.rows(chunk, Floats.ENDS), fill) for chunk in chunks]
        for rows, expected in zip(batches, alone, strict=True):
            padded = {key: torch.cat([rows[key], pads[key]]) for key in rows}
            for key, at in self._writes(padded, fill).items():
                own, values = expected[key]
                strays = at[~torch.isin(at, own)]
                if self.has_pad_values:  # these may write places that no row of a batch has
                    own_places = [places[key][0] for places in alone]
                    taken = torch.cat([*own_places, *(places[key] for places in further)])
                    strays = strays[torch.isin(strays, taken)]
                changed = own[_differ(values, written.memory[key][own])]
                for element in torch.cat([changed, strays])[:1].tolist():
                    raise self._pad_error(written.place(key, element))

    def _pad_error(self, place: str) -> ConfigError:
        integers = [
            key for key, rows in self.arguments.example.items() if not rows.is_floating_point()
        ]
        message = (
            f"{self.arguments.name}: pad rows write into {place}, which belongs to the caller."
        )
        if not integers:
            advice = (
                " Write at an index that is an argument, whose pad_values= is a place that no row "
                "of a batch uses, or create the tensor in the function."
            )
            return ConfigError(message + advice, field="pad_values")
        named = ", ".join(f"{key!r}: {self.arguments.pads[key]}" for key in integers)
        source = "pad_values" if self.has_pad_values else "the smallest numbers of the example"
        places = ", ".join(f"{key!r}: ..." for key in integers)
        return ConfigError(
            f"{message} Pads hold {source} ({named}). Reserve a place that no row of a batch uses, "
            f"such as slot 0, keep it out of the example, and pass it as pad_values={{{places}}}.",
            field="pad_values",
        )

    def _writes(self, rows: _Rows, fill: Mapping[int, float]) -> dict[int, torch.Tensor]:
        """Return the elements that rows write in storages that are filled, by storage."""
        self.written.fill(fill)
        self.arguments.run(rows, self.device)
        return self.written.changes(fill)

    def _fill(self, rows: _Rows) -> dict[int, float]:
        """Return a number of the size of what rows write per storage, beside which writes show."""
        numbers = {}
        for key, at in self._writes(rows, {}).items():
            flat = self.written.memory[key]
            if flat.is_floating_point():
                values = flat[at].float().abs()
                values = values[values.isfinite()]
                size = float(values.max()) if values.numel() else 0.0
                numbers[key] = 1.375 * size or 1.375
        return numbers

    def _pads(self, count: int) -> _Rows:
        pads = self.arguments.pads
        return {
            key: torch.full_like(rows[:1], pads[key]).expand(count, *rows.shape[1:])
            for key, rows in self.arguments.example.items()
        }

    def _accepted(self, rows: _Rows, live: int) -> dict[str, torch.Tensor] | None:
        """Return a row of the results; ``None`` if the function raises an error for the values."""
        try:
            return self._run(rows, [live])
        except ConfigError:  # the caller did not choose these values
            return None

    def _run(self, rows: _Rows, live: Any) -> dict[str, torch.Tensor]:
        """Return some rows of the results of all rows."""
        self.written.restore()
        output = self.results.output(self.arguments.run(rows, self.device)).tensors()
        return {name: tensor[list(live)].clone() for name, tensor in output.items()}


def _with_row(rows: _Rows, base: _Rows, live: int) -> _Rows:
    """Return rows with one row of another batch."""
    return {
        key: torch.cat([rows[key][:live], own_rows[live : live + 1], rows[key][live + 1 :]])
        for key, own_rows in base.items()
    }


def _differ(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return which elements differ by more than rounding."""
    if not values.is_floating_point() or not values.numel():
        return values != others
    one, other = values.float(), others.float()
    size = torch.where(one.isfinite(), one.abs(), 0.0).max()
    limit = _STATE_ULPS * torch.finfo(values.dtype).eps * size
    return ~((one == other) | (one.isnan() & other.isnan()) | ((one - other).abs() <= limit))
