"""Validation and chunked prefill of prompts."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from graphkit.config import require_int
from graphkit.engine.device_step import DeviceStep
from graphkit.engine.request import Request
from graphkit.engine.sampling import sample_tokens
from graphkit.engine.step_tensors import Prefilled
from graphkit.engine.transfers import to_device
from graphkit.errors import InputError


class PromptPrefill:
    """Prefills prompts chunk by chunk with target and drafter.

    Chunks run eagerly, since their length is not a captured width.

    Args:
        device_step: The device's part of a step.
        req_to_token: KV slot of each token, the request pool's table.
        chunk_size: Most prompt tokens per forward.
        bos_token_id: Replaces an empty prompt; with ``None``, an empty prompt is an error.
        generator: Source of random numbers for first tokens.

    Raises:
        ConfigError: ``chunk_size`` is below 1.
    """

    def __init__(
        self,
        device_step: DeviceStep,
        req_to_token: torch.Tensor,
        chunk_size: int,
        bos_token_id: int | None,
        generator: torch.Generator,
    ) -> None:
        require_int("SpeculativeEngine", "chunked_prefill_size", chunk_size)
        self._device_step, self._req_to_token = device_step, req_to_token
        self._chunk_size, self._bos, self._generator = chunk_size, bos_token_id, generator

    def validate(self, prompt_ids: Sequence[int], context_limit: int) -> tuple[int, ...]:
        """Return the prompt's token ids, or the BOS token for an empty prompt.

        Raises:
            InputError: The prompt is empty without a BOS token, is no sequence of token ids, or
                leaves no room for a new token within ``context_limit`` tokens.
        """
        try:
            ids = tuple(operator.index(token) for token in prompt_ids)
        except TypeError as error:
            raise _error(
                f"is not a sequence of token ids: {error}", "Pass a sequence of ints."
            ) from error
        if not ids and self._bos is not None:
            ids = (self._bos,)
        vocab_size = self._device_step.context.sizes.vocab_size
        if not ids:
            raise _error("is empty", "Pass at least one token, or give the engine a bos_token_id.")
        outside = next((token for token in ids if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise _error(
                f"contains token {outside}, but the vocabulary has {vocab_size} tokens",
                f"Use ids from 0 to {vocab_size - 1}.",
            )
        if len(ids) >= context_limit:
            raise _error(
                f"has {len(ids)} tokens, but prompt and output together are limited to "
                f"{context_limit}",
                "Shorten the prompt, or increase max_context_len.",
            )
        return ids

    def prefill(self, request: Request) -> torch.Tensor:
        """Prefill the prompt with target and drafter; its KV slots must be reserved.

        Returns:
            The first new token, int64 [1], on the device.
        """
        length, device = len(request.prompt_ids), self._req_to_token.device
        row = to_device([request.row], device)
        # The last element receives the first new token.
        ids = to_device([*request.prompt_ids, 0], device)
        slots = self._req_to_token[request.row, :length].long()
        for start in range(0, length, self._chunk_size):
            end = min(start + self._chunk_size, length)
            output = self._device_step.verifier.prefill(
                row, start, ids[start:end], slots[start:end]
            )
            if end == length:
                logits = output.next_token_logits[-1:]
                ids[length:] = sample_tokens(logits, request.sampling.temperature, self._generator)
            self._device_step.drafter.prefill(
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
        self._device_step.start(row, length, ids[length:])
        return ids[length:]


def _error(fact: str, remedy: str) -> InputError:
    return InputError(f"the prompt {fact}. {remedy}", field="prompt_ids")
