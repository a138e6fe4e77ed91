"""Prompts from options, a file or stdin; text as it is generated, its measurements on stderr.

Bytes of a prompt that are not UTF-8 become lone surrogates (``surrogateescape``), as in
``sys.argv``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt, and what its line of a file of JSON says about it.

    Attributes:
        text: The text to continue, or the last message of a chat.
        messages: A chat, with the keys of the tokenizer's chat template; ``None`` for a text.
        place: The line and the file of JSON; empty for a prompt without further keys.
        id: The ``id`` of the line, else its number.
        stop: Stop strings beside those of the command.
        settings: Attributes of ``SamplingParams`` that replace those of the command.
    """

    text: str
    messages: Sequence[Mapping[str, Any]] | None = None
    place: str = ""
    id: object = None
    stop: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(texts: Sequence[str] | None, file: Path | None) -> list[Prompt]:
    """Return the prompts of ``--prompt`` and ``--prompts``, at least one.

    ``-`` is stdin. Without both, the prompt is stdin if it is piped, else the first line of a
    function.

    Raises:
        UsageError: The file or stdin cannot be read, or stdin is asked for twice.
    """
    if texts is None and file is None:
        is_piped = sys.stdin is not None and not sys.stdin.isatty()
        return [Prompt(text=(is_piped and _read_stdin()) or _DEFAULT_PROMPT)]
    texts = texts or []
    if texts.count("-") > 1:
        raise UsageError(
            "--prompt - was given more than once, but stdin can be read once. Give it once."
        )
    prompts = [Prompt(text=_read_stdin() if text == "-" else text) for text in texts]
    return prompts + (read_prompt_file(file) if file is not None else [])


def read_prompt_file(file: Path) -> list[Prompt]:
    r"""Return the prompts of a file, at least one. Empty lines are left out.

    If a line is a JSON object with a ``prompt`` or ``messages``, every line must be one. It may
    have an ``id``, ``stop`` strings and attributes of ``SamplingParams``, too. Otherwise every line
    is a prompt, without the ``\n`` or ``\r\n`` at its end.

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
    bodies = [_json_object(line) for _, line in numbered]
    if not any(body.keys() & {"prompt", "messages"} for body in bodies):
        return [Prompt(text=line) for _, line in numbered]
    return [
        _parse_line(body, number, file) for (number, _), body in zip(numbered, bodies, strict=True)
    ]


def _json_object(line: str) -> dict[str, Any]:
    """Return the JSON object of a line, which is empty for a line of anything else."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _parse_line(body: dict[str, Any], number: int, file: Path) -> Prompt:
    """Return the prompt of a line of JSON."""
    place = f"line {number} of {file}"
    text, messages = body.pop("prompt", None), body.pop("messages", None)
    if text is None and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        text = str(messages[-1].get("content", ""))
    elif not isinstance(text, str) or messages is not None:
        raise UsageError(
            f"{place} is not a JSON object with a prompt. Write "
            '{"prompt": "..."} or {"messages": [...]} on every line, or plain text on every line.'
        )
    stop = body.pop("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
        raise UsageError(f"{place}: stop must be a string or a list of strings, not empty.")
    return Prompt(
        text=text,
        messages=messages,
        place=place,
        id=body.pop("id", number),
        stop=tuple(stop),
        settings=body,
    )


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


def print_result(prompt: Prompt, completion: Completion, times: Mapping[str, float]) -> None:
    """Print the completion of a line of JSON as a line of JSON, with its id and its times."""
    result = {"id": prompt.id, **asdict(completion), **times}
    write_stdout(json.dumps(result) + "\n")


def print_generated(record: GenerateRecord, *, as_json: bool, is_printed: bool) -> None:
    """Print the record as JSON, or the texts that are not printed yet and the measurements."""
    if as_json:
        write_stdout(record.to_json())
        return
    if not is_printed:
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
