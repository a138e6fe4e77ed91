"""Prompts from options, a file or stdin; text as it is generated, its measurements on stderr.

Bytes of a prompt that are not UTF-8 become lone surrogates (``surrogateescape``), as in
``sys.argv``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from graphkit.cli.exits import UsageError
from graphkit.cli.output import is_terminal, print_message, progress_on_stderr, write_stdout
from graphkit.errors import ConfigError
from graphkit.records import Completion, GenerateRecord
from graphkit.views import generate_view, visible

if TYPE_CHECKING:
    from graphkit.models.byte_tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
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


class TextStream:
    """Decodes the new tokens of a request into pieces of text.

    A piece never ends within a character: bytes of a character that is not complete wait for the
    others. The prompt and all pieces together are the text of all tokens, so a piece starts with a
    space where the tokenizer drops the space that starts a text.

    The text ends before the stop string that is complete first. Text that may become a stop string
    waits for the characters after it. Pieces do not depend on how tokens are grouped into calls,
    only their borders do.

    Args:
        tokenizer: Decodes the tokens.
        prompt_ids: Tokens before the first new one.
        stop: Stop strings.

    Attributes:
        text: All pieces so far.
        is_stopped: Whether a stop string ended the text.

    Raises:
        ConfigError: A stop string is empty.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), stop: Collection[str] = ()
    ) -> None:
        if "" in stop:
            raise ConfigError(
                "a stop string is empty, which would end every text at once. Pass at least one "
                "character.",
                field="stop",
            )
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        # Decoding starts a few tokens before the first one without text: the text of a token
        # depends on the tokens before it. `_known` is the text of the first `_read` tokens.
        self._window, self._read = list(prompt_ids), len(prompt_ids)
        self._known = tokenizer.decode(self._window)
        self._held = ""
        self.text = ""
        self.is_stopped = False

    def append(self, tokens: Sequence[int]) -> str:
        """Add new tokens and return the next piece; empty after a stop string."""
        if self.is_stopped:
            return ""
        self._window += tokens
        decoded = self._tokenizer.decode(self._window)
        if len(decoded) <= len(self._known) or decoded.endswith(_INCOMPLETE):
            return ""
        new = decoded[len(self._known) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._known = self._tokenizer.decode(self._window)
        return self._piece(new)

    def finish(self) -> str:
        """Return the last piece, with U+FFFD for bytes whose character is not complete."""
        if self.is_stopped:
            return ""
        piece = self._piece(self._tokenizer.decode(self._window)[len(self._known) :])
        rest, self._held = self._held, ""
        self.text += rest
        return piece + rest

    def _piece(self, new: str) -> str:
        """Return what can be given out of held and new text, and hold the rest."""
        text = self._held + new
        # Held text is shorter than a stop string, so that no match starts before it.
        ends = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if ends:
            self.is_stopped, self._held = True, ""
            piece = text[: min(ends)[1]]
        else:
            length = len(text) - self._length_to_hold(text)
            piece, self._held = text[:length], text[length:]
        self.text += piece
        return piece

    def _length_to_hold(self, text: str) -> int:
        """Return the length of the longest end of a text that starts a stop string."""
        lengths = (n for s in self._stop for n in range(len(s)) if text.endswith(s[:n]))
        return max(lengths, default=0)
