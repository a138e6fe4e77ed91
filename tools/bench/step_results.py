"""Results of ``step.py``: what it adds to the report, the bars, and the lines that it prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from report_file import write_report
from step_engines import Setting

from graphkit.cli.benchmarks import Steps
from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure

_V2_BAR = {1: 0.5, 4: 0.4}
"""Largest time per step over that of v2, by topk."""
_V2_BAR_SIZES = (1, 8)
_OWN_NODES_BAR, _HOST_BAR_US, _LOAD_BAR = 40, 2.0, 1.2
_DEFAULT, _LONGEST = "loop of 16", "loop of 64"
"""The engine's default, and the variant of the bars on host time and load."""
_UNITS = {
    "time per step": "ms", "p50": "ms", "p99": "ms", "tokens": "tokens/s", "host": "us",
    "GPU busy": "",
}  # fmt: skip
"""Units of the columns of the printed tables."""


@dataclass
class Results:
    """What was measured so far, written to a file after each section.

    Attributes:
        device: The device.
        settings: Options of the run.
        out: The file; ``None`` to write none.
        measures: The results.
        failed: Errors of sections, by name.
    """

    device: torch.device
    settings: dict[str, int | str]
    out: Path | None = None
    measures: list[Measure] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str, bar: float | None = None) -> None:
        """Add a result."""
        self.measures.append(Measure(name=name, value=value, unit=unit, bar=bar))

    def run(self, section: str, measure: Callable[[Results], None]) -> None:
        """Measure a section, note its error if it fails, and write the file."""
        began = time.monotonic()
        try:
            measure(self)
        except Exception as error:  # the other sections are still worth their time
            self.failed[section] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{section} failed: {self.failed[section]}", flush=True)
        print(f"  ({section}: {time.monotonic() - began:.0f} s)", flush=True)
        self.write()

    def write(self) -> None:
        """Write the file, if there is one."""
        write_report(self.report(), self.out)

    def report(self) -> BenchReport:
        """Return the report."""
        failed = {f"failed: {name}": error for name, error in self.failed.items()}
        return BenchReport(
            name="step: speculative steps of the reference engine by generation",
            environment=environment(self.device),
            settings={**self.settings, **failed},
            measures=tuple(self.measures),
        )


@dataclass
class SettingResults:
    """Times of all variants of a setting, by name.

    Attributes:
        setting: The setting.
        idle: Steps on an idle host.
        loaded: Steps beside busy processes; empty without them.
        host_us: Microseconds of the host's thread per step, as ``HostMeasuredEngine.host_us``.
        bare_ms: Device time of the whole step.
        nodes: Nodes of the whole step.
    """

    setting: Setting
    idle: Mapping[str, Steps]
    loaded: Mapping[str, Steps]
    host_us: Mapping[str, Mapping[str, float]]
    bare_ms: float
    nodes: Mapping[str, int]

    def publish(self, results: Results) -> None:
        """Add everything to the report, and print it."""
        setting = self.setting
        results.add(f"{setting}, bare step", self.bare_ms, "ms")
        for what, count in self.nodes.items():
            is_judged = what == "own nodes" and setting.topk == 1
            results.add(f"{setting}: {what}", count, "", _OWN_NODES_BAR if is_judged else None)
        counts = "; ".join(f"{what} {count}" for what, count in self.nodes.items())
        print(f"\n{setting}: bare step {self.bare_ms:.3f} ms; {counts}", flush=True)
        print(_row("", list(_UNITS)), flush=True)
        for name, seen in self.idle.items():
            more = {"GPU busy": self.bare_ms / seen.ms_per_step, **self.host_us[name]}
            self._publish_line(results, name, _values(seen) | more)
            if name in self.loaded:
                self._publish_line(results, f"{name}, loaded", _values(self.loaded[name]))
        for measure in self.judged():
            results.measures.append(measure)
            print(f"  {measure.name}: {measure.value:.2f} {measure.unit}", flush=True)

    def judged(self) -> Iterator[Measure]:
        """Yield the quotients with their bars, and the host time of the longest loop."""
        setting, idle = self.setting, self.idle
        for name, seen in idle.items():
            is_judged = name in (_DEFAULT, _LONGEST) and setting.batch_size in _V2_BAR_SIZES
            if name not in ("v1", "v2"):
                yield Measure(
                    name=f"{setting}, {name} over v2",
                    value=seen.ms_per_step / idle["v2"].ms_per_step,
                    unit="x",
                    bar=_V2_BAR.get(setting.topk) if is_judged else None,
                )
        for name, seen in self.loaded.items():
            yield Measure(
                name=f"{setting}, {name}, loaded over idle",
                value=seen.ms_per_step / idle[name].ms_per_step,
                unit="x",
                bar=_LOAD_BAR if name == _LONGEST else None,
            )
        if _LONGEST in self.host_us:
            yield Measure(
                name=f"{setting}, {_LONGEST}, host per step",
                value=self.host_us[_LONGEST]["host"],
                unit="us",
                bar=_HOST_BAR_US,
            )

    def _publish_line(self, results: Results, name: str, values: Mapping[str, float]) -> None:
        for what, value in values.items():
            unit = _UNITS[what.partition(",")[0]]
            results.add(f"{self.setting}, {name}: {what}", value, unit)
        cells = [f"{values[what]:.3f}" if what in values else "" for what in _UNITS]
        print(_row(name, cells), flush=True)


def _values(seen: Steps) -> dict[str, float]:
    return {
        "time per step": seen.ms_per_step,
        "p50": seen.latency_ms(50),
        "p99": seen.latency_ms(99),
        "tokens": seen.tokens_per_second,
    }


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:20}" + "".join(f"{cell:>14}" for cell in cells)
