"""``graphkit doctor``: what this machine has, what works, and what to install."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from graphkit.cli.exits import DONE
from graphkit.cli.screen import show

if TYPE_CHECKING:
    from graphkit.views import Fact


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's words."""
    parser = commands.add_parser(
        "doctor",
        help="say what works on this machine and what to install",
        description="Say what works on this machine and what to install.",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from graphkit.views import doctor_view

    facts = list(_facts())
    if arguments.json:
        show(json.dumps([asdict(fact) for fact in facts], indent=2) + "\n")
    else:
        show(doctor_view(facts))
    return DONE


def _facts() -> Iterator[Fact]:
    import torch

    from graphkit.graphs.driver import driver_version, runtime
    from graphkit.graphs.environment import installed
    from graphkit.views import Fact

    has_cuda = torch.cuda.is_available()
    yield Fact("torch", torch.__version__, True)
    triton = installed("triton")
    yield Fact("triton", triton, bool(triton), "pip install triton, for the CUDA kernels")
    yield Fact(
        "CUDA device",
        torch.cuda.get_device_name() if has_cuda else "",
        has_cuda,
        "none is needed: device='cpu' records and replays anywhere"
        + ("" if torch.version.cuda else "; this torch is a CPU build"),
    )
    bindings = installed("cuda-bindings")
    yield Fact(
        "cuda-bindings",
        bindings,
        bool(runtime()),
        "pip install 'graphkit[cuda]', to count nodes and to upload graphs before the first replay",
    )
    if has_cuda:
        yield Fact("CUDA of torch", torch.version.cuda or "", True)
        yield Fact("driver", driver_version(), True)
    yield Fact("recorder backend", "any machine", True)
    usable = has_cuda and bool(triton)
    yield Fact("cuda backend", "graphs" if usable else "", usable, "needs a CUDA device and triton")
