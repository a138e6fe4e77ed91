"""Chat templates of checkpoint folders, rendered as transformers renders them.

Templates run in the sandbox of Jinja and see what ``apply_chat_template`` of transformers offers
for one message without tools: the message, the special tokens, ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, ``break``, ``continue``, and the block
``generation``, which marks the text of replies and prints it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from graphkit.errors import CheckpointError
from graphkit.reference.checkpoint_folder import read_json_if_present

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


def render_chat(folder: Path, message: str) -> str:
    """Return the text of a chat of one user message, up to the start of the reply.

    Args:
        folder: Contains ``chat_template.jinja``, or ``tokenizer_config.json`` with a
            ``chat_template``.
        message: The user's message.

    Raises:
        CheckpointError: The folder has no template, the package ``jinja2`` is missing, or the
            template fails.
    """
    config = read_json_if_present(folder, _CONFIG)
    template = _template(folder, config)
    environment = _environment(folder)
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": message}],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **_special_tokens(config),
        )
    except Exception as error:  # a template may raise anything
        reason = str(error).partition("\n")[0].rstrip(".")
        raise CheckpointError(
            f"the chat template of {str(folder)!r} fails for a user message: "
            f"{type(error).__name__}: {reason}. Pass the prompt as plain text."
        ) from error


def _template(folder: Path, config: Mapping[str, object]) -> str:
    if (folder / _FILE).is_file():
        try:
            return (folder / _FILE).read_text(encoding="utf-8")
        except ValueError as error:
            raise CheckpointError(
                f"{str(folder / _FILE)!r} is not UTF-8: {error}. Download it again."
            ) from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {each.get("name"): each for each in template if isinstance(each, dict)}
        template = named.get("default", {}).get("template")
    if isinstance(template, str):
        return template
    raise CheckpointError(
        f"{str(folder)!r} has no chat template: neither {_FILE} nor a chat_template in {_CONFIG}. "
        "Use the folder of a chat model, or pass the prompt as plain text."
    )


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return the special tokens, which are stored as text or as an object with its ``content``."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _environment(folder: Path) -> ImmutableSandboxedEnvironment:
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise CheckpointError(
            f"the chat template of {str(folder)!r} needs the package jinja2, which is not "
            "installed. Install graphkit-cuda[models]."
        ) from error

    class GenerationBlock(Extension):
        """Prints the body of ``{% generation %}``."""

        tags = {"generation"}  # noqa: RUF012 -- declared so by Jinja

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})
