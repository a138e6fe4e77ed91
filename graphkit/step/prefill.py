"""Chunked prefill of prompts with target and drafter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from graphkit.config import require_int
from graphkit.graphs import Backend
from graphkit.step.device_step import DeviceStep
from graphkit.step.sampling_params import SamplingParams
from graphkit.step.step_tensors import PrefillChunk, copied_to, to_device
from graphkit.step.warm_up import warm_up


class Prefill:
    """Prefills prompts chunk by chunk. Chunks run eagerly: their length is not a captured width.

    Args:
        device_step: The step that continues the requests.
        chunk_size: Most prompt tokens per forward.

    Raises:
        ConfigError: ``chunk_size`` is below 1.
    """

    def __init__(self, device_step: DeviceStep, chunk_size: int) -> None:
        require_int("Prefill", "chunked_prefill_size", chunk_size)
        self._device_step, self._chunk_size = device_step, chunk_size

    def warm_up(self, backend: Backend) -> None:
        """Prefill pads of row 0, so that all state exists and the kernels of prompts are compiled.

        Args:
            backend: Backend of the graphs that are captured next.

        Raises:
            CaptureError: A forward raised an exception.
        """
        longest = min(self._chunk_size, self._device_step.context.sizes.max_context_len)
        lengths = {1, longest}
        if backend.device.type == "cuda":  # Triton compiles anew for 1 and for multiples of 16
            lengths |= {min(15, longest), min(16, longest)}
        chunks = [partial(self._run_pads, length) for length in sorted(lengths)]
        warm_up(backend, self._device_step.verifier.runner.mode, chunks)

    def run(
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
        step, context = self._device_step, self._device_step.context
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

    def _run_pads(self, length: int) -> None:
        """Run all that ``run`` does for a chunk on row 0 and slot 0."""
        step, context = self._device_step, self._device_step.context
        pads = torch.zeros(length, dtype=torch.int64, device=context.device)
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
