"""What an audit of a program checks and may cost, and how its processes learn of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORT_VARIABLE = "GRAPHKIT_AUDIT"
"""The environment variable that names the report, and turns the audit on."""
_NUMBERS = {"every": int, "seconds": float, "megabytes": int}
"""Options that are numbers, each in a variable of its own, such as ``GRAPHKIT_AUDIT_EVERY``."""
_FAULT, _NODES = f"{REPORT_VARIABLE}_FAULT", f"{REPORT_VARIABLE}_NODES"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Options of an audit of foreign graphs.

    Attributes:
        report: File of the report.
        every: Number of replays of a graph between two checks with poisoned memory; 0 checks the
            first replay alone.
        seconds: Time that one such check may take. What needs more is listed as not checked.
        megabytes: Device memory that it may use beside the program's, in MiB, at most half of what
            is free.
        find_fault: Whether to wait for each replay, so that a fault is assigned to its replay.
        node_by_node: Name of a graph, and the number of its replay that runs node by node; ``None``
            for none.
    """

    report: Path
    every: int = 0
    seconds: float = 2.0
    megabytes: int = 4096
    find_fault: bool = False
    node_by_node: tuple[str, int] | None = None

    @classmethod
    def from_environment(cls) -> AuditOptions | None:
        """Return the options of this process; ``None`` if it is not audited.

        A variable that is no number keeps the default.
        """
        report = os.environ.get(REPORT_VARIABLE)
        if not report:
            return None
        name, _, number = os.environ.get(_NODES, "").rpartition("#")
        numbers: dict[str, Any] = {}
        for option, kind in _NUMBERS.items():
            with suppress(KeyError, ValueError):
                numbers[option] = kind(max(float(os.environ[_variable(option)]), 0.0))
        return cls(
            report=Path(report).absolute(),
            find_fault=os.environ.get(_FAULT) == "1",
            node_by_node=(name, int(number)) if number.isdecimal() else None,
            **numbers,
        )

    def environment(self) -> Mapping[str, str]:
        """Return the variables that ``from_environment`` reads."""
        variables = {REPORT_VARIABLE: str(self.report), _FAULT: "1" if self.find_fault else "0"}
        variables |= {_variable(option): str(getattr(self, option)) for option in _NUMBERS}
        if self.node_by_node is not None:
            variables[_NODES] = "{}#{}".format(*self.node_by_node)
        return variables


def _variable(option: str) -> str:
    return f"{REPORT_VARIABLE}_{option.upper()}"
