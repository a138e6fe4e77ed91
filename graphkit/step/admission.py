"""Admission of requests: checks of what a caller passes, and the prefill of the prompt.

``SpeculativeEngine`` and ``SpecStepRunner.admit`` both admit requests through ``Admission``. The
engine allocates rows and KV slots itself; ``SpecStepRunner.admit`` checks those of its caller.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial

import torch

from graphkit.errors import InputError
from graphkit.graphs import Backend
from graphkit.step.device_step import DeviceStep
from graphkit.step.sampling_params import SamplingParams
from graphkit.step.step_tensors import PrefillChunk, copied_to, to_device


class Admission:
    """Checks requests, and prefills their prompts chunk by chunk with target and drafter.

    Chunks run eagerly: their length is not a captured width.

    Args:
        device_step: The step that continues the requests.
        context_limit: Most tokens of a prompt and its output together.
        seed: Gives a different seed to each request that has none.
        bos_token_id: Replaces an empty prompt; with ``None``, an empty prompt is an error.

    Attributes:
        context_limit: As passed.
        vocab_size: Tokens of the target's vocabulary.
    """

    def __init__(
        self,
        device_step: DeviceStep,
        context_limit: int,
        *,
        seed: int = 0,
        bos_token_id: int | None = None,
    ) -> None:
        context = device_step.context
        self._step, self._chunk_size = device_step, context.options.chunked_prefill_size
        self.context_limit, self.vocab_size = context_limit, context.sizes.vocab_size
        self._seed, self._bos, self._checked = seed, bos_token_id, 0

    def check(
        self, prompt_ids: Sequence[int], sampling: SamplingParams | None
    ) -> tuple[tuple[int, ...], SamplingParams]:
        """Return token ids and parameters of a new request, which have a seed.

        Args:
            prompt_ids: Token ids to continue.
            sampling: ``None`` selects the defaults.

        Raises:
            InputError: The prompt is empty without a BOS token, is not a sequence of token ids, or
                leaves no room for a new token. ``sampling`` is not a ``SamplingParams``, or has a
                stop token outside the vocabulary.
        """
        params, ids = self._valid_sampling(sampling), self._valid_prompt(prompt_ids)
        self._checked += 1
        return ids, params.with_seed(self._seed, self._checked)

    def prefill(
        self,
        row: int,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        max_new_tokens: int,
        bitmask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Prefill a prompt, so that the request takes part in the next step. Does not wait.

        Args:
            row: Row of the request; its KV slots of the prompt are in ``req_to_token``.
            prompt_ids: Token ids of the prompt, at least one.
            sampling: Parameters of the request.
            max_new_tokens: Most tokens to generate, the context limit included.
            bitmask: Tokens that may be the first new one, [1, ceil(V / 32)] int32 on the CPU;
                ``None`` allows all.

        Returns:
            The report of the first new token, [1, 5] int32, on the device.
        """
        step, context = self._step, self._step.context
        length, device = len(prompt_ids), context.device
        rows = to_device([row], device)
        step.state.assign(row, length, sampling, max_new_tokens)
        # The last element receives the first new token.
        ids = to_device([*prompt_ids, 0], device)
        slots = context.req_to_token[row, :length].long()
        allowed = None if bitmask is None else copied_to(device, bitmask)
        for start in range(0, length, self._chunk_size):
            end = min(start + self._chunk_size, length)
            output = step.verifier.prefill(rows, start, ids[start:end], slots[start:end])
            if end == length:
                logits = output.next_token_logits[-1:]
                ids[length:] = step.verifier.first_token(
                    rows, logits, is_greedy=sampling.temperature == 0, bitmask=allowed
                )
            step.drafter.prefill(
                PrefillChunk(
                    req_pool_indices=rows,
                    start=start,
                    input_ids=ids[start:end],
                    next_ids=ids[start + 1 : end + 1],
                    out_cache_loc=slots[start:end],
                    hidden_states=output.hidden_states,
                    is_last=end == length,
                )
            )
        one = torch.ones_like(rows, dtype=torch.int32)
        return step.state.advance(rows, ids[length:], one, 1)

    def warm_up(self, backend: Backend) -> None:
        """Prefill pads of row 0, so that all state exists and the kernels of prompts are compiled.

        Args:
            backend: Backend of the graphs that are captured next.

        Raises:
            CaptureError: A forward raised an exception.
        """
        longest = min(self._chunk_size, self._step.context.sizes.max_context_len)
        lengths = {1, longest}
        if backend.device.type == "cuda":  # Triton compiles anew for 1 and for multiples of 16
            lengths |= {min(15, longest), min(16, longest)}
        chunks = [partial(self._run_pads, length) for length in sorted(lengths)]
        self._step.warm_up(backend, chunks)

    def _run_pads(self, length: int) -> None:
        """Run all that ``prefill`` does for a chunk on row 0 and slot 0."""
        step = self._step
        pads = torch.zeros(length, dtype=torch.int64, device=step.context.device)
        row = pads[:1]
        output = step.verifier.prefill(row, 0, pads, pads)
        logits = output.next_token_logits[-1:]
        step.verifier.first_token(row, logits, is_greedy=True)
        allowed = step.verifier.all_allowed(1)
        first = step.verifier.first_token(row, logits, is_greedy=False, bitmask=allowed)
        step.drafter.prefill(
            PrefillChunk(
                req_pool_indices=row,
                start=0,
                input_ids=pads,
                next_ids=pads,
                out_cache_loc=pads,
                hidden_states=output.hidden_states,
                is_last=True,
            )
        )
        step.state.advance(row, first, torch.ones_like(row, dtype=torch.int32), 1)

    def _valid_sampling(self, sampling: object) -> SamplingParams:
        if sampling is None:
            return SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise InputError(
                f"sampling must be a graphkit.SamplingParams or None, got {sampling!r}.",
                field="sampling",
            )
        largest = max(sampling.stop_token_ids, default=0)
        if largest >= self.vocab_size:
            raise InputError(
                f"SamplingParams.stop_token_ids has {largest}, but the vocabulary has "
                f"{self.vocab_size} tokens. Use ids from 0 to {self.vocab_size - 1}.",
                field="stop_token_ids",
            )
        return sampling

    def _valid_prompt(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        try:
            ids = tuple(operator.index(token) for token in prompt_ids)
        except TypeError as error:
            raise _prompt_error(
                f"is not a sequence of token ids: {error}", "Pass a sequence of ints."
            ) from error
        if not ids and self._bos is not None:
            ids = (self._bos,)
        if not ids:
            raise _prompt_error(
                "is empty", "Pass at least one token, or give an engine a bos_token_id."
            )
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise _prompt_error(
                f"contains token {outside}, but the vocabulary has {self.vocab_size} tokens",
                f"Use ids from 0 to {self.vocab_size - 1}.",
            )
        if len(ids) >= self.context_limit:
            raise _prompt_error(
                f"has {len(ids)} tokens, but prompt and output together are limited to "
                f"{self.context_limit}",
                "Shorten the prompt, or increase max_context_len.",
            )
        return ids


def _prompt_error(fact: str, remedy: str) -> InputError:
    return InputError(f"the prompt {fact}. {remedy}", field="prompt_ids")
