"""OpenAI's completions and chat completions over an ``EngineThread``, for any web framework."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from graphkit.config import require_type
from graphkit.engine.engine_thread import EngineThread
from graphkit.engine.request import FinishReason
from graphkit.engine.request_stream import TokenDecoder
from graphkit.engine.step import SamplingParams
from graphkit.errors import InputError, short_repr

_SETTINGS = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"} | {
    name: name
    for name in (
        "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "min_tokens",
    )
}  # fmt: skip
"""Attributes of ``SamplingParams`` by their names in a body."""
_OTHERS = ("prompt", "messages", "model", "stream", "stop", "user", "metadata", "store")
_EXCLUSIVE = ("prompt", "messages"), ("max_tokens", "max_completion_tokens")
"""Keys of which a body has one."""
_DEFAULTS = {"n": 1, "best_of": 1, "echo": False, "stream_options": None, "logprobs": False}
"""Keys that graphkit does not support, with the value that asks for nothing."""
_REASONS = {
    FinishReason.STOP: "stop", FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length", FinishReason.CONTEXT: "length",
}  # fmt: skip


@runtime_checkable
class ChatTokenizer(TokenDecoder, Protocol):
    """A tokenizer of prompts and chats, such as ``TransformersModel.tokenizer``."""

    def encode(self, text: str, /) -> Sequence[int]:
        """Return the token ids of a prompt."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /) -> Sequence[int]:
        """Return the token ids of a chat, up to the start of the reply."""
        ...

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """Return sampling parameters: those of the model, with changes."""
        ...


class OpenAIRequest:
    """A body of OpenAI's completions, or of chat completions if it has ``messages``, as a request.

    Creating it submits the request. Answer with ``events`` if ``is_streamed``, else with ``reply``
    when ``stream`` has ended. HTTP is the caller's: answer a ``ReplayError``, which is a full queue
    or a thread that takes no requests, with status 503, and other errors with 400.

    Args:
        thread: The thread of the engine.
        tokenizer: Encodes prompts and has the sampling parameters of the model.
        body: The JSON of the request.
        timeout_s: As for ``EngineThread.submit``.

    Attributes:
        stream: The stream of the request.
        is_streamed: Whether the body asks for events.

    Raises:
        InputError: The body has no prompt, has a key that would have no effect or contradicts
            another one, or as for ``EngineThread.submit``.
        ConfigError: A setting is out of range.
        ReplayError: As for ``EngineThread.submit``.
    """

    def __init__(
        self,
        thread: EngineThread,
        tokenizer: ChatTokenizer,
        body: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
    ) -> None:
        name, encoder = type(self).__name__, "an object with encode, encode_chat and decode"
        require_type(name, "thread", thread, EngineThread, "an EngineThread")
        require_type(name, "tokenizer", tokenizer, ChatTokenizer, encoder)
        require_type(name, "body", body, Mapping, "a JSON object")
        _check_keys(body)
        settings = {
            _SETTINGS[key]: value
            for key, value in body.items()
            if key in _SETTINGS and value is not None
        }
        stop = body.get("stop") or ()
        self._is_chat = body.get("messages") is not None
        self.is_streamed = bool(body.get("stream"))
        self.stream = thread.submit(
            _prompt_ids(body, tokenizer),
            tokenizer.sampling_params(**settings),
            stop=(stop,) if isinstance(stop, str) else stop,
            timeout_s=timeout_s,
        )
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head = {
            "id": uuid.uuid4().hex,
            "object": kind + ".chunk" * (self._is_chat and self.is_streamed),
            "model": body.get("model", ""),
        }

    async def events(self) -> AsyncIterator[str]:
        """Yield the server-sent events of the answer. Leaving the iteration ends the request."""
        async with self.stream:
            async for output in self.stream:
                yield f"data: {json.dumps(self._answer(output.text, is_last=False))}\n\n"
            yield f"data: {json.dumps(self._answer('', is_last=True))}\n\ndata: [DONE]\n\n"

    def reply(self) -> dict[str, Any]:
        """Return the JSON of the answer, when ``stream`` has ended."""
        return self._answer(self.stream.text, is_last=True)

    def _answer(self, text: str, *, is_last: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": None, "text": text}
        if self._is_chat:
            message = {"role": "assistant", "content": choice.pop("text")}
            choice["delta" if self.is_streamed else "message"] = message
        if not is_last:
            return {**self._head, "choices": [choice]}
        request = self.stream.request
        reason = request.finish_reason
        choice["finish_reason"] = _REASONS.get(reason, "abort") if reason else "abort"
        prompt, new = len(request.prompt_ids), len(self.stream.token_ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**self._head, "choices": [choice], "usage": usage}


def _check_keys(body: Mapping[str, Any]) -> None:
    """Refuse keys that would have no effect, or another one than they say."""
    for pair in _EXCLUSIVE:
        if all(body.get(key) is not None for key in pair):
            text = f"the body has both {' and '.join(pair)}. Leave one out."
            raise InputError(text, field=pair[0])
    if not isinstance(body.get("stream"), bool | None):
        raise InputError(
            f"stream must be true or false, got {short_repr(body['stream'])}.", field="stream"
        )
    for key, value in body.items():
        is_default = value is None or (key in _DEFAULTS and value == _DEFAULTS[key])
        if key not in _SETTINGS and key not in _OTHERS and not is_default:
            raise InputError(
                f"the body has {key}: {short_repr(value)}, which is not supported. Leave it out.",
                field=key,
            )


def _prompt_ids(body: Mapping[str, Any], tokenizer: ChatTokenizer) -> Sequence[int]:
    messages, prompt = body.get("messages"), body.get("prompt")
    if messages is not None:
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
            raise InputError("messages must be a list of JSON objects.", field="messages")
        return tokenizer.encode_chat(messages)
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, list):
        return prompt  # token ids, which submit checks
    raise InputError(
        f"the body needs messages, or a prompt that is a text or a list of token ids; got "
        f"{short_repr(prompt)}.",
        field="prompt",
    )
