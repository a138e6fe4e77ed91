"""Prompts: which are taken, and how target and drafter read them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from graphkit.config import require_int
from graphkit.engine.generations import Core
from graphkit.engine.memory import to_device
from graphkit.engine.parts import Prefilled
from graphkit.engine.request import Request
from graphkit.engine.sampling import choose
from graphkit.errors import InputError


class PromptReader:
    """Reads prompts chunk by chunk, eagerly: a prompt's length is no captured width.

    Args:
        core: The device's side.
        req_to_token: The request pool's table.
        chunk: Most tokens at once.
        bos_token_id: What an empty prompt is replaced by; ``None`` refuses it.
        generator: Draws first tokens.

    Raises:
        ConfigError: ``chunk`` is below 1.
    """

    def __init__(
        self,
        core: Core,
        req_to_token: torch.Tensor,
        chunk: int,
        bos_token_id: int | None,
        generator: torch.Generator,
    ) -> None:
        require_int("SpeculativeEngine", "chunked_prefill_size", chunk)
        self._core, self._req_to_token, self._chunk = core, req_to_token, chunk
        self._bos, self._generator = bos_token_id, generator

    def checked(self, prompt_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """The prompt, if it can be continued within ``limit`` tokens.

        Raises:
            InputError: It cannot.
        """
        try:
            ids = tuple(operator.index(token) for token in prompt_ids)
        except TypeError as error:
            raise _refusal(f"is no sequence of token ids: {error}", "Give ints.") from error
        if not ids and self._bos is not None:
            ids = (self._bos,)
        vocab_size = self._core.context.sizes.vocab_size
        if not ids:
            raise _refusal("is empty", "Give at least one token, or the engine a bos_token_id.")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise _refusal(f"holds {min(ids)} to {max(ids)}", f"Tokens are 0 to {vocab_size - 1}.")
        if len(ids) >= limit:
            raise _refusal(
                f"has {len(ids)} tokens; prompt and output together have room for {limit}",
                "Shorten it or make max_context_len larger.",
            )
        return ids

    def read(self, request: Request) -> torch.Tensor:
        """Have target and drafter read the prompt; its slots are reserved.

        Returns:
            The first new token, int64 [1], on the device.
        """
        length, device = len(request.prompt_ids), self._req_to_token.device
        row = to_device([request.row], device)
        ids = to_device([*request.prompt_ids, 0], device)  # the last place is for the first token
        slots = self._req_to_token[request.row, :length].long()
        for start in range(0, length, self._chunk):
            end = min(start + self._chunk, length)
            output = self._core.verifier.read(row, start, ids[start:end], slots[start:end])
            if end == length:
                logits = output.next_token_logits[-1:]
                ids[length:] = choose(logits, request.sampling.temperature, self._generator)
            self._core.drafter.prefill(
                Prefilled(
                    req_pool_indices=row,
                    start=start,
                    input_ids=ids[start:end],
                    next_ids=ids[start + 1 : end + 1],
                    out_cache_loc=slots[start:end],
                    hidden_states=output.hidden_states,
                    is_last=end == length,
                )
            )
        self._core.start(row, length, ids[length:])
        return ids[length:]


def _refusal(fact: str, remedy: str) -> InputError:
    return InputError(f"the prompt {fact}. {remedy}", field="prompt_ids")
