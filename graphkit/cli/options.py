"""Options that several commands share, how they are parsed, and the layout of their help."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from graphkit.cli.exits import UsageError
from graphkit.spec import ForwardMode

_T = TypeVar("_T")
QUANTIZATIONS = ("fp8", "int4")
"""Formats of weights; ``graphkit.models.quantization``, which has them, needs torch."""
SPECULATION = ("topk", "num_steps", "num_draft_tokens", "page_size")
"""Options of drafts and pages, as arguments of engines name them."""


class HelpFormatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a description or an epilog; keeps a block with indented lines.

    The formatters of ``argparse`` wrap a text as one paragraph or not at all. Names such as
    ``pool-poison`` stay on one line.
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


def add_checkpoint_options(
    parser: argparse.ArgumentParser,
    *,
    instead_of: str,
    among: argparse._ActionsContainer | None = None,
    compares: bool = False,
) -> None:
    """Declare --checkpoint, and the options that say how models are loaded and speculate.

    --checkpoint is one of the alternatives ``among``, if any. A command that ``compares`` takes
    several formats of the weights.
    """
    (among or parser).add_argument(
        "--checkpoint", type=Path, metavar="DIR",
        help="folder of a causal language model that transformers loads, instead of "
        f"{instead_of}; needs graphkit-cuda[models]",
    )  # fmt: skip
    parser.add_argument(
        "--draft", type=_parse_draft, metavar="DIR|mtp",
        help="folder of a draft model for the --checkpoint, or mtp for the MTP layers in it",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="data type of the --checkpoint; default: its own on CUDA, float32 on the CPU",
    )  # fmt: skip
    parser.add_argument(
        "--trust-remote-code", action="store_true", default=None,
        help="run Python code in the folders of --checkpoint and --draft, for types that "
        "transformers does not have; read the code before",
    )  # fmt: skip
    parser.add_argument(
        "--kv-dtype", choices=("fp8",),
        help="data type of the keys and values of the target: fp8 is float8_e4m3fn; default: the "
        "data type of its weights",
    )  # fmt: skip
    if compares:
        parser.add_argument(
            "--quantize", metavar="none,fp8,int4",
            type=parse_list(choice("none", *QUANTIZATIONS), "none,fp8,int4"),
            help="formats of the weights of linear layers, which are quantised at load; several "
            "are compared; default: none, the weights as they are",
        )  # fmt: skip
    else:
        parser.add_argument(
            "--quantize", choices=QUANTIZATIONS,
            help="store the weights of linear layers in eight (fp8) or four (int4) bits; default: "
            "as they are",
        )  # fmt: skip
    parser.add_argument(
        "--row-invariant",
        action="store_true",
        help="make the bits of a row independent of its batch, instead of the fastest ops",
    )
    parser.add_argument(
        "--algorithm", type=str.upper, metavar="A",
        help="speculative algorithm, in any case: NONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, "
        "STANDALONE, NGRAM or DFLASH; default: EAGLE for the reference model; for a --checkpoint "
        "that of its --draft, else NGRAM",
    )  # fmt: skip
    parser.add_argument(
        "--topk", type=int, metavar="K", help="branches per draft step; default: 1, a chain"
    )
    parser.add_argument(
        "--num-steps", type=_parse_steps, metavar="S",
        help="draft steps; several ascending numbers, such as 0,1,3,5, let each step choose; "
        "default: 3, or one per MTP layer if there are fewer; generate also takes 0 and 1, and "
        "lets each step choose",
    )  # fmt: skip
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="W",
        help="tokens per request in one verify, the root included; default: S + 1 for topk 1, else "
        "2 * (S + 1)",
    )  # fmt: skip
    parser.add_argument("--page-size", type=int, metavar="N", help="KV slots per page; default: 1")


def add_context_option(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare --max-context-len."""
    parser.add_argument(
        "--max-context-len", type=parse_count, metavar="N",
        help="most tokens of a prompt and its output, drafts included; the KV pools have room for "
        f"it; default: {default}",
    )  # fmt: skip


def add_target_options(
    parser: argparse.ArgumentParser,
    *,
    default_sizes: str = "those of TARGET, else powers of two",
    metavar: str = "TARGET",
    record: str = "",
) -> None:
    """Declare TARGET or --checkpoint, --mode, --batch-sizes and --device.

    ``record`` describes the file that the command takes instead of a TARGET, if it does.
    """
    modes = [mode.name for mode in ForwardMode if not mode.is_idle()]
    parser.add_argument(
        "target", nargs="?", metavar=metavar,
        help=f"{record}package.module:attribute, importable from the working directory: a "
        "CaptureTarget, or a function that returns one (called with device= if it has that "
        "parameter); default: the reference model",
    )  # fmt: skip
    parser.add_argument(
        "--mode", action="append", metavar="M",
        help=f"forward mode to capture, in any case: {', '.join(modes[:-1])} or {modes[-1]}; "
        "repeatable; default: every mode of TARGET",
    )  # fmt: skip
    parser.add_argument(
        "--batch-sizes", type=_parse_sizes, metavar="1,2,4",
        help="batch sizes to capture, in requests; the largest batch of TARGET is always added; "
        f"default: {default_sizes}",
    )  # fmt: skip
    add_device_option(parser)
    add_checkpoint_options(parser, instead_of="a TARGET")
    add_context_option(parser, "the context of the model, at most 256")


def refuse_options(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse options that would have no effect; ``why`` follows the name of one.

    Raises:
        UsageError: One of them was given.
    """
    for name in names:
        if getattr(arguments, name) not in (None, False):
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def _parse_steps(text: str) -> int | tuple[int, ...]:
    """Return one number of draft steps, or several."""
    try:
        steps = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of draft steps, such as 3, and no list, such as 0,1,3,5"
        ) from error
    return steps if len(steps) > 1 else steps[0]


def speculation_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of drafts and pages that the command line names."""
    settings = {name: getattr(arguments, name) for name in SPECULATION}
    return {name: value for name, value in settings.items() if value is not None}


def _parse_sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 1,2,4") from None


def _parse_draft(text: str) -> str | Path:
    return text if text == "mtp" else Path(text)


def parse_count(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises:
        ArgumentTypeError: The text is not such a number, or has ten digits or more.
    """
    if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def parse_list(parse: Callable[[str], _T], example: str) -> Callable[[str], list[_T]]:
    """Return a parser of lists separated by commas, without duplicates."""

    def parse_text(text: str) -> list[_T]:
        try:
            return list(dict.fromkeys(map(parse, text.split(","))))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}; give a list such as {example}") from None

    return parse_text


def choice(*names: str) -> Callable[[str], str]:
    """Return a parser of one of some names, for lists."""

    def parse(text: str) -> str:
        if text in names:
            return text
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")

    return parse


exists, is_folder = os.path.exists, os.path.isdir
"""Unlike the methods of ``Path``, false for a name that the system refuses, such as a long one."""
