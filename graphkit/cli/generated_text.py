"""Generated text on stdout, streamed or printed at the end, and its measurements on stderr."""

from __future__ import annotations

import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console

from graphkit.cli.output import is_terminal, print_message, progress_on_stderr, write_stdout
from graphkit.records import Completion, GenerateRecord
from graphkit.views import generate_view, visible

OnText = Callable[[bytes], None]
"""Takes each new piece of text, which may end within a character."""
TextDisplay = Callable[[Sequence[bytes], int], AbstractContextManager[OnText]]
"""Takes the prompts and the largest number of new bytes; the block receives an ``OnText``."""


@contextmanager
def count_text(_prompts: Sequence[bytes], max_new_bytes: int) -> Iterator[OnText]:
    """Show the number of new bytes in a progress bar on stderr."""
    done = 0
    with progress_on_stderr() as progress:

        def on_text(text: bytes) -> None:
            nonlocal done
            done += len(text)
            progress(done, max_new_bytes, "generating")

        yield on_text


@contextmanager
def stream_text(prompts: Sequence[bytes], _max_new_bytes: int) -> Iterator[OnText]:
    """Print the only prompt to the terminal, then its continuation as it is generated.

    A character is printed once all of its bytes have arrived. The block always ends its line, also
    after an error.
    """
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    (prompt,) = prompts
    try:
        write_stdout(_dimmed(prompt.decode(errors="replace")))
        yield lambda text: write_stdout(visible(decoder.decode(text)))
        write_stdout(visible(decoder.decode(b"", final=True)))
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
        write_stdout("\n".join(map(_text_of, record.completions)))
    if is_terminal(sys.stdout):
        print_message("")
    print_message(generate_view(record))


def _text_of(completion: Completion) -> str:
    """Return the text with a newline at its end; on a terminal, escaped and after its prompt."""
    text = completion.text
    if is_terminal(sys.stdout):
        text = _dimmed(completion.prompt) + visible(text)
    return text if text.endswith("\n") else f"{text}\n"


def _dimmed(prompt: str) -> str:
    console = Console()
    is_plain = console.color_system is None or console.no_color
    return visible(prompt) if is_plain else f"\x1b[2m{visible(prompt)}\x1b[0m"
