"""``graphkit generate``: continue prompts with speculative decoding and report its performance."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from graphkit.cli.exit_codes import DONE, UsageError
from graphkit.cli.help_format import HelpFormatter
from graphkit.cli.output import is_terminal
from graphkit.cli.target_options import add_device_option

_DEFAULT_PROMPT = b"def read(self, size=-1):\n"
_LARGEST_SEED = 2**63 - 1


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts with the reference models",
        description="Continue prompts with speculative decoding, by a small model of Python source "
        "that ships with graphkit and its draft models. The text goes to stdout, the measurements "
        "to stderr.",
        epilog="""
tokens/s counts the time from the prompts to the last token: prefill included, loading and capture
left out.

Examples:
  graphkit generate --prompt 'import os' --max-new-tokens 64
  graphkit generate --algorithm NGRAM --topk 2 --num-draft-tokens 8 --json
  git show HEAD:setup.py | graphkit generate --temperature 0.7 --seed 1
""",
        formatter_class=HelpFormatter,
    )
    _add_input(parser)
    _add_speculation(parser)
    _add_sampling(parser)
    add_device_option(parser)
    parser.add_argument("--eager", action="store_true", help="run without graphs")
    parser.add_argument("--json", action="store_true", help="print the record instead of the text")
    parser.set_defaults(run=run)


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT",
        help="text to continue, - for stdin; repeatable; default: stdin if it is piped, else the "
        "head of a Python function",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER",
        help="checkpoint of a target whose tokens are bytes, for NONE and NGRAM; default: the "
        "reference model",
    )  # fmt: skip


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--algorithm", default="EAGLE", metavar="A",
        help="speculative algorithm, in any case: NONE, EAGLE, MULTI_LAYER_EAGLE, STANDALONE or "
        "NGRAM; default: EAGLE",
    )  # fmt: skip
    parser.add_argument(
        "--topk", type=int, default=1, metavar="K",
        help="branches per draft step; default: 1, a chain",
    )  # fmt: skip
    parser.add_argument(
        "--num-steps", type=int, default=3, metavar="S", help="draft steps; default: 3"
    )
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="W",
        help="tokens per request in one verify, the root included; default: S + 1 for topk 1, else "
        "2 * (S + 1)",
    )  # fmt: skip
    parser.add_argument(
        "--generation", choices=("v1", "v2", "v3"),
        help="v1 waits for the host after each step, v2 overlaps steps with the host, v3 runs many "
        "steps in one launch; default: v3 where it can run, else v2",
    )  # fmt: skip
    parser.add_argument(
        "--steps-per-launch", type=int, default=16, metavar="N",
        help="most steps of one launch in v3; default: 16",
    )  # fmt: skip


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N",
        help="largest number of new tokens per prompt; default: 128",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T",
        help="sampling temperature; default: 0, which is greedy decoding",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=_parse_seed, default=0, metavar="N",
        help="seed of the random numbers, 0 to 2**63 - 1; default: 0",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from graphkit.cli.completions import complete
    from graphkit.cli.generated_text import count_text, print_generated, stream_text

    prompts = _read_prompts(arguments.prompt)
    is_streamed = len(prompts) == 1 and is_terminal(sys.stdout) and not arguments.json
    record = complete(arguments, prompts, stream_text if is_streamed else count_text)
    print_generated(record, as_json=arguments.json, is_streamed=is_streamed)
    return DONE


def _parse_seed(text: str) -> int:
    if text.isdecimal() and int(text) <= _LARGEST_SEED:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {_LARGEST_SEED}")


def _read_prompts(texts: list[str] | None) -> list[bytes]:
    """Return the prompts as bytes, which need not be UTF-8: the model's tokens are bytes."""
    if texts is None:
        is_piped = sys.stdin is not None and not sys.stdin.isatty()
        return [(is_piped and _read_stdin()) or _DEFAULT_PROMPT]
    if texts.count("-") > 1:
        raise UsageError(
            "--prompt - was given more than once, but stdin can be read once. Give it once."
        )
    return [_read_stdin() if text == "-" else os.fsencode(text) for text in texts]


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise UsageError("cannot read a prompt from stdin: it is closed. Give --prompt TEXT.")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"cannot read a prompt from stdin: {error}. Give --prompt TEXT.") from None
