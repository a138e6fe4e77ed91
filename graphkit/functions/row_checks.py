"""Whether rows of a function are independent, and whether its pad rows write into its state.

The function runs without a graph, on rows that the example does not have. One row stays the same
while the others change: its results must stay the same, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphkit.errors import ConfigError, OutputError
from graphkit.functions.arguments import Arguments
from graphkit.functions.drawn_rows import DrawnRows, Floats, Integers
from graphkit.functions.results import Results
from graphkit.functions.written_tensors import WrittenTensors
from graphkit.graphs import StateSnapshot
from graphkit.records import Mismatch
from graphkit.verify import PADDING_LEAKS, Rounding, first_difference

_MOST_ROWS = 4
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
                self._check_repeats()
                if self.largest > 1:
                    self._check_pad_writes()
                    self._check_independence()
            finally:
                self.written.restore()

    def _check_repeats(self) -> None:
        """Run the same rows twice."""
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

    def _check_independence(self) -> None:
        """Change all rows of a batch but one."""
        states = bool(self.written.memory)  # rows that write must not share their places
        count = min(_MOST_ROWS, self.largest, self.arguments.num_rows if states else _MOST_ROWS)
        if count < 2:
            return
        for seed, live in enumerate((0, count - 1)):
            for base, changed in self._variants(seed, count, live):
                expected, got = self._run(base, [live]), self._run(changed, [live])
                found = self._differs(expected, got)
                if found is None:
                    continue
                argument = self._followed(base, changed, live, expected)
                raise OutputError(
                    f"{self.arguments.name}: {PADDING_LEAKS}: row {live} of `{found.field}` is "
                    f"{found.got} instead of {found.expected} with other values of {argument} in "
                    f"the other rows. {ROW_ADVICE}"
                )

    def _variants(self, seed: int, count: int, live: int) -> Iterator[tuple[_Rows, _Rows]]:
        """Yield batches with one equal row, and others in all other rows."""
        near, far = ((Floats.MIDDLE, Floats.ENDS), (Floats.LOW, Floats.HIGH))[seed]
        order = [(live + i) % self.arguments.num_rows for i in range(count)]
        draw = DrawnRows(self.arguments, seed, uses_example=False)
        base = draw.rows(order, near, negates=seed > 0)
        if not self._runs(base):  # it accepts the values of the example alone
            draw = DrawnRows(self.arguments, seed, uses_example=True)
            base = draw.rows(order, near)
        other = [order[(i + 1) % count] for i in range(count)]
        other = [each for each in other if each != order[live]] or other
        other = [other[i % len(other)] for i in range(count)]
        if self.written.memory:  # a permutation, so that rows have places of their own
            others = [i for i in range(count) if i != live]
            other = list(order)
            for place, source in zip(others, [*others[1:], *others[:1]], strict=True):
                other[place] = order[source]
        yield base, self._with_row(draw.rows(other, far), base, live)
        pads = self._pads(count)
        if not self.written.memory:
            yield base, self._with_row(pads, base, live)
        # An index that is out of range raises on the CPU, but ends the process on CUDA.
        may_vary = self.device.type == "cpu" and not self.written.memory
        if may_vary and any(not each.is_floating_point() for each in base.values()):
            for source in (Integers.COLUMN, Integers.ARGUMENT):
                changed = self._with_row(draw.rows(other, far, source), base, live)
                if self._runs(changed):
                    yield base, changed

    def _followed(self, base: _Rows, changed: _Rows, live: int, expected: _Rows) -> str:
        """Return the first argument whose values in other rows a row of the results follows."""
        for key in base:
            one = {**base, key: changed[key]}
            if self._runs(one) and self._differs(expected, self._run(one, [live])):
                return f"argument `{key}`"
        return "several arguments"

    def _differs(self, expected: _Rows, got: _Rows) -> Mismatch | None:
        ulps = self.rounding.beside(0.0)

        def allowed(field: torch.Tensor) -> torch.Tensor:
            # Relative to this row: its kernels have the same shapes in both runs.
            size = torch.where(field.isfinite(), field, 0).double().abs().max()
            eps = torch.finfo(self.rounding.coarser_dtype(field)).eps
            return torch.full_like(field, ulps * eps, dtype=torch.double) * size

        return first_difference(expected, got, lambda row, _: row, self.rounding, allowed)

    def _check_pad_writes(self) -> None:
        """Compare what rows of the example write with what they write beside pad rows."""
        if not self.written.memory:
            return
        arguments, draw = self.arguments, DrawnRows(self.arguments, 0, uses_example=False)
        if not self._runs(draw.rows([0], Floats.ENDS)):
            draw = DrawnRows(arguments, 0, uses_example=True)
        batches = [draw.rows([i], Floats.ENDS) for i in range(min(_MOST_ROWS, arguments.num_rows))]
        noise = self._noise(batches[0])
        before = self._contents_after(noise, None)
        alone = [self._contents_after(noise, rows) for rows in batches]
        writes = {
            key: torch.stack([_changed(before[key], each[key]) for each in alone]).any(0)
            for key in before
        }
        pads = self._pads(min(self.largest, _MOST_ROWS) - 1)
        for rows, expected in zip(batches, alone, strict=True):
            padded = {key: torch.cat([rows[key], pads[key]]) for key in rows}
            got = self._contents_after(noise, padded)
            for key in before:
                strays = _changed(expected[key], got[key])
                if self.has_pad_values:  # these may write places that no row of a batch has
                    strays &= writes[key]
                if bool(strays.any()):
                    place = self.written.place(key, int(strays.nonzero()[0]))
                    raise self._pad_error(place)

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

    def _noise(self, rows: _Rows) -> dict[int, torch.Tensor]:
        """Return random contents of the size of what rows write, so that each write shows."""
        self.written.restore()
        before = self.written.contents()
        self._call(rows)
        noise, generator = {}, torch.Generator().manual_seed(0)
        for key, after in self.written.contents().items():
            if after.is_floating_point():
                wrote = after[_changed(before[key], after)].float().abs()
                wrote = wrote[wrote.isfinite()]
                size = float(wrote.max()) if wrote.numel() else 1.0
                drawn = torch.randn(after.shape, generator=generator) * (size or 1.0)
                noise[key] = drawn.to(after.device, after.dtype)
        return noise

    def _contents_after(
        self, noise: Mapping[int, torch.Tensor], rows: _Rows | None
    ) -> dict[int, torch.Tensor]:
        """Return what the written tensors contain after a call that began with noise in them."""
        self.written.restore()
        for key, values in noise.items():
            self.written.memory[key].copy_(values)
        if rows is not None:
            self._call(rows)
        return self.written.contents()

    def _pads(self, count: int) -> _Rows:
        pads = self.arguments.pads
        return {
            key: torch.full_like(rows[:1], pads[key]).expand(count, *rows.shape[1:])
            for key, rows in self.arguments.example.items()
        }

    @staticmethod
    def _with_row(rows: _Rows, base: _Rows, live: int) -> _Rows:
        """Return rows with one of another batch."""
        index = torch.arange(len(next(iter(base.values()))))
        return {
            key: torch.where(
                (index == live).to(rows[key].device).view(-1, *[1] * (rows[key].ndim - 1)),
                base[key],
                rows[key],
            )
            for key in base
        }

    def _runs(self, rows: _Rows) -> bool:
        """Return whether the function accepts rows."""
        self.written.restore()
        try:
            self._call(rows)
        except Exception:
            return False
        return True

    def _run(self, rows: _Rows, live: Any) -> dict[str, torch.Tensor]:
        """Return some rows of the results of all rows."""
        self.written.restore()
        output = self.results.output(self._call(rows)).tensors()
        return {name: tensor[list(live)].clone() for name, tensor in output.items()}

    def _call(self, rows: _Rows) -> Any:
        on_device = {key: tensor.to(self.device, copy=True) for key, tensor in rows.items()}
        return self.arguments.call(self.arguments.inputs(on_device))


def _changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return which elements differ by more than rounding."""
    if not before.is_floating_point():
        return before != after
    one, other = before.float(), after.float()
    finite = torch.where(one.isfinite(), one.abs(), 0.0)
    limit = 16 * torch.finfo(before.dtype).eps * finite.max()
    same = (one == other) | (one.isnan() & other.isnan()) | ((one - other).abs() <= limit)
    return ~same
