"""Prompts from options, a file or stdin; text as it is generated, its measurements on stderr.

Bytes of a prompt that are not UTF-8 become lone surrogates (``surrogateescape``), as in
``sys.argv``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rich.console import Console

from graphkit.cli.exits import UsageError
from graphkit.cli.output import is_terminal, print_message, progress_on_stderr, write_stdout
from graphkit.records import Completion, GenerateRecord
from graphkit.views import generate_view, visible

_DEFAULT_PROMPT = "def read(self, size=-1):\n"

OnText = Callable[[str, int], None]
"""Takes each new piece of text, in whole characters, and the number of new tokens."""
TextDisplay = Callable[[Sequence[str], int], AbstractContextManager[OnText]]
"""Takes the prompts and the largest number of new tokens; the block receives an ``OnText``."""


def read_prompts(texts: Sequence[str] | None, file: Path | None) -> list[str]:
    """Return the prompts of ``--prompt`` and ``--prompts``, at least one.

    Without both, the prompt is stdin if it is piped, else the head of a Python function.

    Args:
        texts: Prompts; ``-`` is stdin.
        file: As for ``read_prompt_file``.

    Raises:
        UsageError: The file or stdin cannot be read, or stdin is asked for twice.
    """
    if texts is None and file is None:
        is_piped = sys.stdin is not None and not sys.stdin.isatty()
        return [(is_piped and _read_stdin()) or _DEFAULT_PROMPT]
    texts = texts or []
    if texts.count("-") > 1:
        raise UsageError(
            "--prompt - was given more than once, but stdin can be read once. Give it once."
        )
    prompts = [_read_stdin() if text == "-" else text for text in texts]
    return prompts + (read_prompt_file(file) if file is not None else [])


def read_prompt_file(file: Path) -> list[str]:
    r"""Return the prompts of a file, at least one. Empty lines are left out.

    If the first line is a JSON object with a ``prompt``, every line must be one, so that a prompt
    may have several lines. Otherwise every line is a prompt, without the ``\n`` or ``\r\n`` at its
    end.

    Raises:
        UsageError: The file cannot be read, holds no prompt, or a line is not such an object.
    """
    try:
        text = file.read_bytes().decode(errors="surrogateescape")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the prompts in {file}: {reason}.") from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError(f"{file} holds no prompt. Write one per line.")
    if _parse_prompt(numbered[0][1]) is None:
        return [line for _, line in numbered]
    prompts = []
    for number, line in numbered:
        prompt = _parse_prompt(line)
        if prompt is None:
            raise UsageError(
                f"line {number} of {file} is not a JSON object with a prompt like the first line. "
                'Write {"prompt": "..."} on every line, or plain text on every line.'
            )
        prompts.append(prompt)
    return prompts


def _parse_prompt(line: str) -> str | None:
    """Return the prompt of a line of JSON; ``None`` if the line is anything else."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return None
    prompt = body.get("prompt") if isinstance(body, dict) else None
    return prompt if isinstance(prompt, str) else None


def _read_stdin() -> str:
    if sys.stdin is None:
        raise UsageError("cannot read a prompt from stdin: it is closed. Give --prompt TEXT.")
    try:
        return sys.stdin.buffer.read().decode(errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"cannot read a prompt from stdin: {error}. Give --prompt TEXT.") from None


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
        texts = (_shown_text(done, prompt_end(record.is_chat)) for done in record.completions)
        write_stdout("\n".join(texts))
    if is_terminal(sys.stdout):
        print_message("")
    print_message(generate_view(record))


def prompt_end(is_chat: bool) -> str:
    """Return what separates a prompt from its text on a terminal: a reply starts a line."""
    return "\n" if is_chat else ""


def _shown_text(completion: Completion, end: str) -> str:
    """Return the text with a newline at its end; on a terminal, escaped and after its prompt."""
    text = completion.text
    if is_terminal(sys.stdout):
        text = _dimmed(completion.prompt + end) + visible(text)
    return text if text.endswith("\n") else f"{text}\n"


def _dimmed(prompt: str) -> str:
    console = Console()
    is_plain = console.color_system is None or console.no_color
    return visible(prompt) if is_plain else f"\x1b[2m{visible(prompt)}\x1b[0m"
