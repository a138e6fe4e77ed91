"""``graphkit generate``: continue prompts with speculative decoding and report its performance."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import DONE
from graphkit.cli.options import add_checkpoint_options, add_context_option, add_device_option
from graphkit.cli.output import at_level, is_terminal
from graphkit.cli.ranks import add_tp_option

if TYPE_CHECKING:
    from graphkit.distributed import RankGroup

_LARGEST_SEED = 2**63 - 1


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts with the reference models, or those of local folders",
        description="Continue prompts with speculative decoding, by any causal language model that "
        "transformers loads from a local folder, with its tokenizer, or by a small model of Python "
        "source that ships with graphkit and its draft models. The text goes to stdout, the "
        "measurements to stderr.",
        epilog="""
tokens/s counts the time from the prompts to the last token: prefill included, loading and capture
left out.

Examples:
  graphkit generate --prompt 'import os' --max-new-tokens 64
  graphkit generate --algorithm NGRAM --topk 2 --num-draft-tokens 8 --json
  git show HEAD:setup.py | graphkit generate --temperature 0.7 --seed 1
  graphkit generate --checkpoint ~/Qwen3-8B --chat --prompt 'What is a CUDA graph?'
  torchrun --nproc-per-node 2 -m graphkit generate --tp 2 --checkpoint ~/Llama-3-70B --prompt Hi
  graphkit generate --checkpoint ~/Llama-2-7b --draft ~/EAGLE-llama2-7B --prompts questions.txt
""",
    )
    _add_input(parser)
    add_checkpoint_options(parser, instead_of="the reference model")
    add_context_option(parser, "the context of the target, at most 4096")
    parser.add_argument(
        "--generation", choices=("v1", "v2", "v3"),
        help="v1 waits for the host after each step, v2 overlaps steps with the host, v3 runs many "
        "steps in one launch; default: v3 where it can run, else v2",
    )  # fmt: skip
    parser.add_argument(
        "--steps-per-launch", type=int, default=16, metavar="N",
        help="most steps of one launch in v3; default: 16",
    )  # fmt: skip
    _add_sampling(parser)
    add_device_option(parser)
    add_tp_option(parser, _run)
    parser.add_argument("--eager", action="store_true", help="run without graphs")
    parser.add_argument("--json", action="store_true", help="print the record instead of the text")


def _add_input(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT",
        help="text to continue, - for stdin; repeatable; default: stdin if it is piped, else the "
        "first line of a Python function",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="file with one prompt per line, or with one JSON object per line: prompt or messages, "
        "and optionally id, stop and settings such as max_new_tokens; each result is then a line "
        "of JSON, printed as soon as it is complete",
    )  # fmt: skip
    parser.add_argument(
        "--chat", action="store_true",
        help="make each prompt a user message by the chat template of the checkpoint",
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
        "--top-k", type=int, default=0, metavar="K",
        help="sample from the K most probable tokens; default: 0, which is all",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P",
        help="sample from the fewest tokens whose probabilities reach P; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P",
        help="sample from tokens with at least P times the largest probability; default: 0",
    )  # fmt: skip
    for name, meaning in {
        "--repetition-penalty": "divide the logits of tokens in the text so far, if positive, else "
        "multiply them, by X",
        "--presence-penalty": "subtract X from the logits of generated tokens, -2 to 2",
        "--frequency-penalty": "subtract X for each time that a token was generated, -2 to 2",
    }.items():
        parser.add_argument(
            name, type=float, metavar="X",
            help=f"{meaning}; default: that of the checkpoint, else none",
        )  # fmt: skip
    parser.add_argument(
        "--min-tokens", type=int, metavar="N",
        help="generate no stop token before N tokens; default: that of the checkpoint, else 0",
    )  # fmt: skip
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end a text before this string; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=_parse_seed, default=0, metavar="N",
        help="seed of the random numbers, 0 to 2**63 - 1; default: 0",
    )  # fmt: skip


def _run(arguments: argparse.Namespace, group: RankGroup | None) -> int:
    from graphkit.cli.generate_texts import (
        count_tokens,
        print_generated,
        print_result,
        read_prompts,
        stream_text,
    )
    from graphkit.cli.run_generate import complete, follow
    from graphkit.distributed import Channel

    channel = None if group is None else Channel(group)
    if channel is not None and group is not None and group.rank:
        follow(arguments, group, int(channel.broadcast()))
        return DONE
    prompts = read_prompts(arguments.prompt, arguments.prompts)
    if channel is not None:
        channel.broadcast(str(len(prompts)).encode())
    is_jsonl = any(prompt.place for prompt in prompts) and not arguments.json
    is_streamed = len(prompts) == 1 and is_terminal(sys.stdout)
    is_streamed = is_streamed and not (arguments.json or is_jsonl)
    on_result = print_result if is_jsonl else lambda *_: None
    display = stream_text if is_streamed else count_tokens
    # With --eager, steps without a graph are what was asked for.
    expected = at_level("graphkit.runners.dispatch", logging.ERROR)
    with expected if arguments.eager else nullcontext():
        record = complete(arguments, prompts, display, group, on_result)
    print_generated(record, as_json=arguments.json, is_printed=is_streamed or is_jsonl)
    return DONE


def _parse_seed(text: str) -> int:
    if text.isdecimal() and int(text) <= _LARGEST_SEED:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {_LARGEST_SEED}")
