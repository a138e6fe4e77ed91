"""Generated text on stdout: as it is made, or whole; the facts about it on stderr."""

from __future__ import annotations

import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console

from graphkit.cli.screen import is_terminal, note, progress_on_stderr, write
from graphkit.records import Completion, GenerateRecord
from graphkit.views import generate_view, visible

Follow = Callable[[bytes], None]
"""Told of new text, which may end in the middle of a character."""
Following = Callable[[Sequence[bytes], int], AbstractContextManager[Follow]]
"""From the prompts and the most bytes that may come to a block that follows them."""


@contextmanager
def counting(_prompts: Sequence[bytes], most: int) -> Iterator[Follow]:
    """Count bytes on a bar on stderr."""
    done = 0
    with progress_on_stderr() as progress:

        def follow(text: bytes) -> None:
            nonlocal done
            done += len(text)
            progress(done, most, "generating")

        yield follow


@contextmanager
def streaming(prompts: Sequence[bytes], _most: int) -> Iterator[Follow]:
    """Show the text of the only prompt on the terminal as it is made.

    Characters appear once all of their bytes are there. However the block ends, the cursor is left
    at the start of a line.
    """
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    (prompt,) = prompts
    try:
        write(_dimmed(prompt.decode(errors="replace")))
        yield lambda text: write(visible(decoder.decode(text)))
        write(visible(decoder.decode(b"", final=True)))
    finally:
        write("\n")


def report(record: GenerateRecord, *, is_json: bool, is_shown: bool) -> None:
    """Print the record, or the texts and then the facts.

    Args:
        record: What came of it.
        is_json: Whether to print the record as it is, and nothing else.
        is_shown: Whether the text is on the terminal already.
    """
    if is_json:
        write(record.to_json())
        return
    if not is_shown:
        write("\n".join(map(_shown, record.completions)))
    if is_terminal(sys.stdout):
        note("")
    note(generate_view(record))


def _shown(completion: Completion) -> str:
    """On a terminal the text behind its prompt, elsewhere the text as it is; ends its line."""
    text = completion.text
    if is_terminal(sys.stdout):
        text = _dimmed(completion.prompt) + visible(text)
    return text if text.endswith("\n") else f"{text}\n"


def _dimmed(prompt: str) -> str:
    console = Console()
    is_plain = console.color_system is None or console.no_color
    return visible(prompt) if is_plain else f"\x1b[2m{visible(prompt)}\x1b[0m"
