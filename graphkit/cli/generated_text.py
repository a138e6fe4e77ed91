"""Generated text on stdout, streamed or printed at the end, and its measurements on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console

from graphkit.cli.output import is_terminal, print_message, progress_on_stderr, write_stdout
from graphkit.records import Completion, GenerateRecord
from graphkit.views import generate_view, visible

OnText = Callable[[str, int], None]
"""Takes each new piece of text, in whole characters, and the number of new tokens."""
TextDisplay = Callable[[Sequence[str], int], AbstractContextManager[OnText]]
"""Takes the prompts and the largest number of new tokens; the block receives an ``OnText``."""


@contextmanager
def count_tokens(_prompts: Sequence[str], max_new_tokens: int) -> Iterator[OnText]:
    """Show the number of new tokens in a progress bar on stderr."""
    done = 0
    with progress_on_stderr() as progress:

        def on_text(_text: str, new_tokens: int) -> None:
            nonlocal done
            done += new_tokens
            progress(done, max_new_tokens, "generating")

        yield on_text


@contextmanager
def stream_text(prompts: Sequence[str], _max_new_tokens: int) -> Iterator[OnText]:
    """Print the only prompt to the terminal, then its continuation as it is generated.

    The block always ends its line, also after an error.
    """
    (prompt,) = prompts
    try:
        write_stdout(_dimmed(prompt))
        yield lambda text, _new_tokens: write_stdout(visible(text))
    finally:
        write_stdout("\n")


def print_generated(record: GenerateRecord, *, as_json: bool, is_streamed: bool) -> None:
    """Print the record, or the texts to stdout and the measurements to stderr.

    Args:
        record: The result.
        as_json: If True, print the record as JSON and nothing else.
        is_streamed: True if the text is on the terminal already.
    """
    if as_json:
        write_stdout(record.to_json())
        return
    if not is_streamed:
        texts = (_text_of(each, prompt_end(record.is_chat)) for each in record.completions)
        write_stdout("\n".join(texts))
    if is_terminal(sys.stdout):
        print_message("")
    print_message(generate_view(record))


def prompt_end(is_chat: bool) -> str:
    """Return what separates a prompt from its text on a terminal: a reply starts a line."""
    return "\n" if is_chat else ""


def _text_of(completion: Completion, end: str) -> str:
    """Return the text with a newline at its end; on a terminal, escaped and after its prompt."""
    text = completion.text
    if is_terminal(sys.stdout):
        text = _dimmed(completion.prompt + end) + visible(text)
    return text if text.endswith("\n") else f"{text}\n"


def _dimmed(prompt: str) -> str:
    console = Console()
    is_plain = console.color_system is None or console.no_color
    return visible(prompt) if is_plain else f"\x1b[2m{visible(prompt)}\x1b[0m"
