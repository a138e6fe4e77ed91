"""``graphkit doctor``: list what works on this machine and what to install."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphkit.cli.exits import DONE
from graphkit.cli.output import print_result


class Fact(NamedTuple):
    """A library, a device or a capability, its version, if it works, and what to do if not."""

    what: str
    found: str
    works: bool
    remedy: str = ""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "doctor",
        help="list what works on this machine and what to install",
        description="List libraries, device and backends of this machine, and what to install for "
        "those that do not work.",
        epilog="""
Exit code 0: the list was printed, whatever it contains.

Example:
  graphkit doctor
""",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    facts = list(_facts())
    if arguments.json:
        print_result(json.dumps([fact._asdict() for fact in facts], indent=2) + "\n")
    else:
        print_result(_table(facts))
    return DONE


def _facts() -> Iterator[Fact]:
    import torch

    from graphkit.graphs.cuda_loop import no_loop_reason
    from graphkit.graphs.devices import driver_version, package_version
    from graphkit.graphs.driver import runtime
    from graphkit.graphs.streams import ONE_STREAM_ADVICE

    has_cuda = torch.cuda.is_available()
    yield Fact("torch", torch.__version__, True)
    triton = package_version("triton")
    yield Fact(
        "triton", triton, bool(triton), "run pip install triton; the CUDA kernels need Triton"
    )
    yield Fact(
        "CUDA device",
        torch.cuda.get_device_name() if has_cuda else "",
        has_cuda,
        "optional: device='cpu' captures and replays on any machine"
        + ("" if torch.version.cuda else "; this torch is a CPU build"),
    )
    bindings = package_version("cuda-bindings")
    yield Fact(
        "cuda-bindings",
        bindings,
        bool(runtime()),
        "run pip install 'graphkit-cuda[cuda]' to inspect CUDA graphs and to upload them before "
        "the first replay",
    )
    if has_cuda:
        yield Fact("CUDA of torch", torch.version.cuda or "", True)
        yield Fact("driver", driver_version(), True)
        yield Fact("streams", ONE_STREAM_ADVICE, True)
    yield Fact("recorder backend", "any machine", True)
    usable = has_cuda and bool(triton)
    yield Fact("cuda backend", "graphs" if usable else "", usable, "needs a CUDA device and Triton")
    refusal = (
        no_loop_reason() if usable else "need the cuda backend; the recorder has them anywhere"
    )
    yield Fact("device loops", "" if refusal else "generation v3", not refusal, refusal)


def _table(facts: Sequence[Fact]) -> RenderableType:
    """Return a table of the facts, and below it what to do about missing ones."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for fact in facts:
        mark = Text("ok", style="green") if fact.works else Text("--", style="yellow")
        table.add_row(mark, fact.what, fact.found or "missing")
    remedies = [
        Text(f"{fact.what}: {fact.remedy}") for fact in facts if not fact.works and fact.remedy
    ]
    return Group(table, *remedies)
