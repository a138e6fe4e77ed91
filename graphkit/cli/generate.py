"""``graphkit generate``: continue prompts with the reference models, and say how it went."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from graphkit.cli.capturing import add_device_option
from graphkit.cli.exits import DONE, UsageError
from graphkit.cli.screen import is_terminal

_PROMPT = b"def read(self, size=-1):\n"
_LARGEST_SEED = 2**63 - 1


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's words."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts with the reference models",
        description="Continue prompts with a small model of Python source that ships with graphkit "
        "and the draft models made for it. Prints the text alone; how it was made goes to stderr.",
        epilog="tokens/s is counted from the reading of the prompts to the last token: prefill "
        "included, loading and capture left out.",
    )
    _add_input(parser)
    _add_speculation(parser)
    _add_output(parser)
    parser.set_defaults(run=run)


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT",
        help="text to continue, - for stdin; may be given again; default: what is piped in, else "
        "the head of a Python function",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER",
        help="another target whose tokens are bytes, for NONE and NGRAM",
    )  # fmt: skip


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--algorithm", default="EAGLE", metavar="A",
        help="NONE, EAGLE, MULTI_LAYER_EAGLE, STANDALONE or NGRAM; default: EAGLE",
    )  # fmt: skip
    parser.add_argument(
        "--topk", type=int, default=1, metavar="K", help="branches per draft step; default: 1"
    )
    parser.add_argument(
        "--num-steps", type=int, default=3, metavar="S", help="draft steps; default: 3"
    )
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="W",
        help="tokens verified at once, the root included; default: S + 1 for topk 1, else twice "
        "that",
    )  # fmt: skip
    parser.add_argument(
        "--generation", choices=("v1", "v2"), help="how steps meet the host; default: v2"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="per prompt; default: 128"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T",
        help="0, the default, takes the likeliest token",
    )  # fmt: skip
    parser.add_argument("--seed", type=_seed, default=0, help="of the draws; default: 0")
    add_device_option(parser)
    parser.add_argument("--eager", action="store_true", help="capture nothing, run without graphs")
    parser.add_argument("--json", action="store_true", help="print the record instead of the text")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from graphkit.cli.completing import complete
    from graphkit.cli.live_text import counting, report, streaming

    prompts = _prompts(arguments.prompt)
    is_live = len(prompts) == 1 and is_terminal(sys.stdout) and not arguments.json
    record = complete(arguments, prompts, streaming if is_live else counting)
    report(record, is_json=arguments.json, is_shown=is_live)
    return DONE


def _seed(text: str) -> int:
    if text.isdecimal() and int(text) <= _LARGEST_SEED:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {_LARGEST_SEED}")


def _prompts(words: list[str] | None) -> list[bytes]:
    """The prompts as bytes, which need not be UTF-8: the model's tokens are bytes."""
    if words is None:
        is_piped = sys.stdin is not None and not sys.stdin.isatty()
        return [(is_piped and _stdin()) or _PROMPT]
    if words.count("-") > 1:
        raise UsageError("--prompt - came more than once, but stdin can be read once. Give one.")
    return [_stdin() if word == "-" else os.fsencode(word) for word in words]


def _stdin() -> bytes:
    if sys.stdin is None:
        raise UsageError("cannot read a prompt from stdin: it is closed. Give --prompt TEXT.")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"cannot read a prompt from stdin: {error}. Give --prompt TEXT.") from None
