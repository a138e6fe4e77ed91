"""``graphkit inspect``: show the graphs of a saved record, or of a target captured now."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from graphkit.cli.exits import DONE, FAILED, UsageError, signals_as_exit
from graphkit.cli.options import add_target_options, exists, is_folder, refuse_options
from graphkit.cli.output import is_terminal, print_message, print_result
from graphkit.cli.targets import FOLDER_OPTIONS, capture_selected, select_target
from graphkit.records import RecordWithGraphs, count_of, load_record, require_graphs


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "inspect",
        help="show the nodes of graphs, the source of each node and its cost",
        description="Show the nodes of graphs, the line and module that each node comes from, and "
        "its cost: on a terminal as a screen (press ? for its keys), in a pipe as text. A whole "
        "step is shown by phase, with its loops. A saved record needs neither a GPU nor a model.",
        epilog="""
With a RECORD, --mode selects what is shown, by the name of a mode or of a graph, and --batch-sizes
does not apply.

--by kernel shows the bytes of the tensors that the arguments of kernels point to, where the record
has the sizes of all of them. This is an upper bound of distinct bytes: a kernel may use a part of a
tensor, such as some rows of an embedding. Rates above 20,000 GB/s are left out for that reason.

Exit code 1: a replay of TARGET is wrong. Exit code 2: the record cannot be read.

Examples:
  graphkit inspect engine.targets:llama --mode decode
  graphkit inspect record.json --mode target_verify --batch-size 8 --plain
  graphkit inspect record.json --by kernel
""",
    )
    add_target_options(
        parser, metavar="RECORD|TARGET", record="a file written by capture --out or record, or "
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="show only graphs of N requests"
    )
    parser.add_argument(
        "--by", choices=("module", "kernel", "time"), default="module",
        help="show the nodes in their modules, summed by kernel, or as they ran; default: module",
    )  # fmt: skip
    parser.add_argument(
        "--plain", action="store_true",
        help="print text, also on a terminal, without colours and bars, as for a screen reader",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if arguments.target is not None and arguments.checkpoint is None:
        path = _saved_record(arguments.target)
        if path is not None:
            return _show(_load(path, arguments), arguments)
    record = capture_selected(select_target(arguments), inspect=True)
    code = _show(record, arguments)
    if record.mismatches:
        rows = count_of(len(record.mismatches), "row")
        print_message(
            f"replays differ from the step without a graph in {rows}. Run graphkit capture to list "
            "the differences."
        )
        return FAILED
    return code


def _saved_record(source: str) -> Path | None:
    """Return the file of a saved record that an argument names, or ``None`` for a TARGET.

    Raises:
        UsageError: It names neither.
    """
    path = Path(source)
    if path.suffix == ".py" and exists(path):
        raise UsageError(
            f"cannot inspect {source!r}: it is a Python file. Name a TARGET in it, such as "
            f"{_module_name(path)}:target, as Python imports it from the working directory."
        )
    if path.suffix == ".json" or (exists(path) and not is_folder(path)):
        return path
    if is_folder(path):
        raise UsageError(
            f"cannot inspect {source!r}: it is a folder. Load a model with --checkpoint {source}, "
            "or name the file of a saved record."
        )
    if ":" not in source:
        raise UsageError(
            f"cannot inspect {source!r}: it is not a file. Name the file of a saved record, or a "
            "TARGET as package.module:attribute."
        )
    return None


def _load(path: Path, arguments: argparse.Namespace) -> RecordWithGraphs:
    if arguments.batch_sizes is not None:
        raise UsageError(
            f"--batch-sizes applies to a TARGET, but {path} is a saved record. Use --batch-size to "
            "select a size of it."
        )
    if arguments.mode is not None and len(arguments.mode) > 1:
        raise UsageError(
            f"--mode was given {len(arguments.mode)} times, but the saved record {path} is shown "
            "by one mode or whole. Give --mode once."
        )
    why = f"applies to a --checkpoint, but {path} is a saved record. Leave it out."
    refuse_options(arguments, (*FOLDER_OPTIONS, "quantize", "row_invariant"), why)
    return require_graphs(load_record(path))


def _show(record: RecordWithGraphs, arguments: argparse.Namespace) -> int:
    modes: list[str] = arguments.mode or []
    mode = modes[0] if len(modes) == 1 else None  # several modes select what a TARGET captures
    size, by, is_plain = arguments.batch_size, arguments.by, arguments.plain
    if arguments.json:
        from graphkit.views.selection import select_graphs, with_only

        graphs = select_graphs(record, mode=mode, batch_size=size)
        print_result(with_only(record, graphs).to_json())
    elif _has_screen() and not is_plain:
        from graphkit.views.tui import InspectApp

        app = InspectApp(record, mode=mode, batch_size=size, by=by)
        with signals_as_exit(app.exit):
            app.run()
        return app.return_code or DONE
    else:
        from graphkit.views.text.inspect import inspect_view

        view = inspect_view(record, mode=mode, batch_size=size, by=by, has_pictures=not is_plain)
        print_result(view, has_styles=not is_plain)
    return DONE


def _has_screen() -> bool:
    """Return True if stdin and stdout are a terminal that can move its cursor."""
    on_terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    return on_terminal and os.environ.get("TERM") not in ("dumb", "unknown")


def _module_name(path: Path) -> str:
    """Return the name by which the working directory imports a file in it; else its own name."""
    path = path.absolute()
    inside = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(path.name)
    return ".".join(inside.with_suffix("").parts)
