"""Options that several commands share, how they are parsed, and the layout of their help."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class HelpFormatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a description or an epilog; keeps a block with indented lines.

    Names such as ``pool-poison`` stay on one line.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            block
            if "\n  " in block
            else textwrap.indent("\n".join(self._split_lines(block, width - len(indent))), indent)
            for block in text.strip().split("\n\n")
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Declare --device."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="device to run on; default: auto, which is cuda if torch sees a CUDA device",
    )  # fmt: skip


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """Declare --algorithm, --topk, --num-steps and --num-draft-tokens."""
    parser.add_argument(
        "--algorithm", metavar="A",
        help="speculative algorithm, in any case: NONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, "
        "STANDALONE or NGRAM; default: EAGLE, or that of the --draft folder, or NGRAM for a "
        "--checkpoint without one",
    )  # fmt: skip
    parser.add_argument(
        "--topk", type=int, default=1, metavar="K",
        help="branches per draft step; default: 1, a chain",
    )  # fmt: skip
    parser.add_argument(
        "--num-steps", type=_num_steps, default=3, metavar="S",
        help="draft steps; several ascending numbers, such as 0,1,3,5, let each step choose; "
        "default: 3",
    )  # fmt: skip
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="W",
        help="tokens per request in one verify, the root included; default: S + 1 for topk 1, else "
        "2 * (S + 1)",
    )  # fmt: skip


def _num_steps(text: str) -> int | tuple[int, ...]:
    """Return one number of draft steps, or several.

    Raises:
        ArgumentTypeError: The text is neither.
    """
    try:
        steps = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of draft steps, such as 3, and no list, such as 0,1,3,5"
        ) from error
    return steps if len(steps) > 1 else steps[0]


def chosen_algorithm(arguments: argparse.Namespace) -> str:
    """Return the algorithm in capitals; the default needs no more models than there are.

    Raises:
        CheckpointError: It is that of a draft folder which cannot be read.
    """
    if arguments.algorithm is not None:
        return str(arguments.algorithm).upper()
    if arguments.draft is not None:
        from graphkit.reference import head_algorithm

        return head_algorithm(arguments.draft)
    return "EAGLE" if arguments.checkpoint is None else "NGRAM"


def model_dtype(folder: Path | None, device: torch.device) -> torch.dtype:
    """Return the data type to run a folder in: its own on CUDA, float32 on the CPU.

    The reference model, ``None``, runs in float32.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    import torch

    from graphkit.reference import checkpoint_dtype

    if device.type == "cuda" and folder is not None:
        return checkpoint_dtype(folder)
    return torch.float32


def use_one_thread() -> None:
    """Compute with one thread, for the small models that ship with graphkit.

    Their operations are so short that waiting for a second thread costs more than it saves, many
    times more on a busy machine.
    """
    import torch

    torch.set_num_threads(1)


def parse_count(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises:
        ArgumentTypeError: The text is not such a number, or has ten digits or more.
    """
    if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def exists(path: Path) -> bool:
    """Return True if the path names something that can be found."""
    try:
        return path.exists()
    except OSError:  # such as a name that is too long
        return False


def is_folder(path: Path) -> bool:
    """Return True if the path names a folder that can be found."""
    return exists(path) and path.is_dir()
