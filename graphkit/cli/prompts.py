"""Prompts from options, a file or stdin.

Bytes that are not UTF-8 become lone surrogates (``surrogateescape``), as in ``sys.argv``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from graphkit.cli.exit_codes import UsageError

_DEFAULT = "def read(self, size=-1):\n"


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
        return [(is_piped and _read_stdin()) or _DEFAULT]
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
    if _prompt_of(numbered[0][1]) is None:
        return [line for _, line in numbered]
    prompts = []
    for number, line in numbered:
        prompt = _prompt_of(line)
        if prompt is None:
            raise UsageError(
                f"line {number} of {file} is not a JSON object with a prompt like the first line. "
                'Write {"prompt": "..."} on every line, or plain text on every line.'
            )
        prompts.append(prompt)
    return prompts


def _prompt_of(line: str) -> str | None:
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
