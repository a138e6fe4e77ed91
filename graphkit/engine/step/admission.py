"""Admission of requests: the prefill of their prompts.

``SpeculativeEngine`` and ``SpecStepRunner.admit`` both admit requests through ``Admission``. The
engine allocates rows and KV slots itself; ``SpecStepRunner.admit`` checks those of its caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from graphkit.config import bitmask_words
from graphkit.engine.step.pad_steps import warm_up
from graphkit.engine.step.prefill_batch import PrefillBatch
from graphkit.engine.step.request_state import Prefill, assign
from graphkit.engine.step.spec_step import SpecStep
from graphkit.graphs import Backend
from graphkit.graphs.devices import copied_to, to_device
from graphkit.ops.recurrent import CHUNK
from graphkit.runners.capture_checks import check_attention

LONGEST_WAIT = 30_000
"""Most microseconds that running requests wait for a graph of prompts, with default settings."""
LEAST_BESIDE = 512
"""Prompt tokens of a forward beside running requests, by default, if no graph says how long more
take."""


class Admission:
    """Prefills prompts in packed chunks with target and drafter.

    Chunks replay a graph of ``PromptRunner`` if one holds them, and run eagerly otherwise. Output
    of a request that runs again is computed as rows of steps, which it was computed as before: rows
    of prompts may run by other kernels, and its keys and values must have the bits that they had. A
    model whose rows are row-invariant computes it as a prompt.

    Args:
        spec_step: The step that continues the requests.
        context_limit: Most tokens of a prompt and its output together.
    """

    def __init__(self, spec_step: SpecStep, context_limit: int) -> None:
        options = spec_step.context.options
        self._step, self._chunk_size = spec_step, spec_step.context.most_prefill_tokens
        self._is_default_size = options.chunked_prefill_size is None
        most_beside = LEAST_BESIDE if self._is_default_size else self._chunk_size
        self._chunk_beside = min(self._chunk_size, most_beside)
        self._context_limit = context_limit
        self._compares_attention, self._is_warm = options.check is not False, False
        self._is_recurrent = spec_step.verifier.recurrent_state is not None
        self._packs = all(runner.step.packs_rows for runner in spec_step.runners)

    def chunks(
        self, prefills: Iterable[Prefill], *, is_anyone_running: bool = False
    ) -> list[tuple[Prefill, int]]:
        """Return which prompts the next forward continues, and by how many tokens each.

        All of them are tokens of prompts, or all are output of requests that run again, as those of
        the first one are. There are up to ``chunked_prefill_size`` tokens in all. Half of them
        belong to the prompt that was admitted first, the others to the shortest ones; what one side
        leaves, the other takes. So a long prompt neither holds up the short ones behind it nor
        waits for all of them. With recurrent layers, prompts are cut at multiples of 64 positions
        if ``chunked_prefill_size`` is at least 64, because their kernels begin a chunk at each.

        Args:
            prefills: Prompts that are not complete, in order of admission.
            is_anyone_running: Whether requests wait for the forward before their next step.
        """
        first, *others = prefills
        budget = self._chunk_beside if is_anyone_running else self._chunk_size
        is_output = self._is_output(first)
        if is_output:
            budget = min(budget, self._step.verifier.most_step_rows)
        if not self._packs or (is_output and self._is_recurrent):
            left = self._left(first)
            count = min(left, budget)
            is_cut = self._is_recurrent and not is_output and count < left
            return [(first, count - count % CHUNK if is_cut and count >= CHUNK else count)]
        others = [prompt for prompt in others if self._is_output(prompt) == is_output]
        counts = {first: min(self._left(first), budget - budget // 2)}
        room = budget - counts[first]
        for prompt in sorted(others, key=self._left):
            if not room:
                break
            counts[prompt] = min(self._left(prompt), room)
            room -= counts[prompt]
        counts[first] += min(self._left(first) - counts[first], room)
        if self._is_recurrent and budget >= CHUNK:
            whole = {
                prompt: count if count == self._left(prompt) else count - count % CHUNK
                for prompt, count in counts.items()
            }
            counts = {prompt: count for prompt, count in whole.items() if count}
            counts = counts or {first: min(self._left(first), CHUNK)}
        return [(prompt, counts[prompt]) for prompt in (first, *others) if prompt in counts]

    def _is_output(self, prompt: Prefill) -> bool:
        """Return whether the next tokens are computed as rows of steps."""
        return self._step.verifier.repeats_steps and prompt.is_at_output

    def _left(self, prompt: Prefill) -> int:
        """Return how many tokens are computed in the same way as the next one."""
        return prompt.left_alike if self._step.verifier.repeats_steps else prompt.left

    def prefill(self, chunks: Sequence[tuple[Prefill, int]]) -> torch.Tensor | None:
        """Prefill chunks of prompts in one forward of the target. Does not wait.

        Complete prompts take part in the next step. After an exception, the same chunks can be
        prefilled again.

        Args:
            chunks: Prompts, and the tokens by which each is continued. Their KV slots are in
                ``req_to_token``.

        Returns:
            The reports of the first new tokens of the prompts that are complete, [complete, 7]
            int32 on the device; ``None`` if none is complete.
        """
        self._check_attention()
        ended = [place for place, (prompt, count) in enumerate(chunks) if count == prompt.left]
        complete = [chunks[place][0] for place in ended]
        if complete:
            assign(self._step.state, complete)
        prompts = [prompt for prompt, _ in chunks]
        starts = [prompt.done for prompt in prompts]
        batch = PrefillBatch.packed(
            self._step.context,
            [prompt.row for prompt in prompts],
            starts,
            [prompt.tokens(count) for prompt, count in chunks],
        )
        report = self._forward(
            batch,
            [place for place, start in enumerate(starts) if start == 0],
            ended,
            is_greedy=not any(prompt.sampling.temperature for prompt in complete),
            bitmask=self._bitmask(complete),
            is_output=self._is_output(prompts[0]),
        )
        for prompt, count in chunks:
            prompt.done += count
        return report

    def capture(self, backend: Backend) -> None:
        """Warm up, and capture the forwards of prompts."""
        self.warm_up(backend)
        if (prompts := self._step.prompts) is not None:
            prompts.capture_if_possible()
            if self._is_default_size and backend.device.type == "cuda":
                most = prompts.tokens_within(LONGEST_WAIT)
                self._chunk_beside = max(self._chunk_beside, most)

    def warm_up(self, backend: Backend) -> None:
        """Prefill pads of row 0, so that all state exists and the kernels of prompts are compiled.

        Does nothing after the first call.

        Raises:
            AttentionError: See ``Runner.capture``.
            CaptureError: A forward raised an exception.
        """
        if self._is_warm:
            return
        self._check_attention()
        sizes = self._step.context.sizes
        # A prompt leaves room for a token, which a draft model may process with it.
        longest = max(1, min(self._chunk_size, self._context_limit - 1))
        batches = [[longest], [1]]
        if backend.device.type == "cuda":
            most = sizes.max_batch_size if self._packs else 1
            batches = [[longest], *warm_up_chunks(longest, self._chunk_size, most)]
        runs = [partial(self._run_pads, lengths, is_greedy=True) for lengths in batches]
        # How the first token is chosen depends on the number of requests alone.
        ones = [lengths for lengths in batches if set(lengths) == {1}]
        runs += [partial(self._run_pads, lengths, is_greedy=False) for lengths in ones]
        warm_up(self._step, backend, runs)
        self._is_warm = True

    def close(self) -> None:
        """Close the graphs of prompts."""
        if self._step.prompts is not None:
            self._step.prompts.close()

    def _check_attention(self) -> None:
        """Compare trees and packed prefills with chains, once."""
        if self._compares_attention:
            verifier, group = self._step.verifier, self._step.context.options.group
            check_attention(verifier.runner, verifier.recurrent_state, group)
        self._compares_attention = False

    def _run_pads(self, lengths: Sequence[int], *, is_greedy: bool) -> None:
        """Run all that ``prefill`` does for prompts of the row of pads."""
        pads = [0] * len(lengths)
        tokens = [[0] * (length + 1) for length in lengths]
        batch = PrefillBatch.packed(self._step.context, pads, pads, tokens)
        allowed = self._step.verifier.all_allowed(1)
        bitmask = None if allowed is None else allowed.expand(len(lengths), -1)
        self._forward(batch, [0], range(len(lengths)), is_greedy=is_greedy, bitmask=bitmask)

    def _forward(
        self,
        batch: PrefillBatch,
        new: Sequence[int],
        complete: Sequence[int],
        *,
        is_greedy: bool,
        bitmask: torch.Tensor | None,
        is_output: bool = False,
    ) -> torch.Tensor | None:
        """Run target and drafter over a batch; see ``prefill``.

        Args:
            batch: The chunks, without hidden states.
            new: Which of the requests begin.
            complete: Which of them have their whole prompt then.
            is_greedy: Whether the temperature of all complete ones is 0.
            bitmask: Tokens that may follow the complete ones; ``None`` allows all.
            is_output: Whether the tokens are output of steps, see ``chunks``.
        """
        step, device = self._step, self._step.context.device
        rows, last_rows = batch.req_pool_indices, batch.last_rows
        begun = rows[to_device(new, device)] if new else None
        if is_output:
            output = step.verifier.repeat_steps(batch)
        else:
            graphs, replay = step.prompts, None
            if graphs is not None and graphs.holds(batch):
                replay = graphs.prefill
            output = step.verifier.prefill(batch, begun, replay)
        first = logits = log_sums = None
        if complete:
            index = to_device(complete, device)
            rows, last_rows = rows[index], last_rows[index]
            logits = output.next_token_logits[index]
            first, log_sums = step.verifier.first_tokens(
                rows, logits, is_greedy=is_greedy, bitmask=bitmask
            )
            batch.next_ids.index_copy_(0, last_rows, first)
        ended = set(complete)
        are_last = [place in ended for place in range(len(batch.lengths))]
        step.drafter.prefill_batch(
            replace(batch, hidden_states=output.hidden_states, are_last=are_last)
        )
        if first is None:
            return None
        one = torch.ones_like(rows, dtype=torch.int32)
        index = torch.arange(len(rows), dtype=torch.int32, device=device)[:, None]
        return step.state.advance(rows, first, one, 1, index, logits, log_sums)

    def _bitmask(self, complete: Sequence[Prefill]) -> torch.Tensor | None:
        """Return the tokens that may follow complete prompts; ``None`` if all may."""
        masks = [prompt.bitmask for prompt in complete]
        if all(mask is None for mask in masks):
            return None
        words = bitmask_words(self._step.context.sizes.vocab_size)
        every = torch.full((1, words), -1, dtype=torch.int32)
        joint = torch.cat([every if mask is None else mask for mask in masks])
        return copied_to(self._step.context.device, joint)


def warm_up_chunks(longest: int, budget: int, most_requests: int) -> list[list[int]]:
    """Return batches of chunks that launch, with few exceptions, the kernels of all batches.

    Triton compiles a kernel for each division of its work, and again for arguments that are 1 or
    multiples of 16. A division depends on the tokens of a batch, on its requests, and on its
    longest chunk, and mostly changes where one of them exceeds a power of two. The exceptions join
    the splits of attention, whose number also changes elsewhere.

    The number of batches grows with the logarithm of the tokens times that of the requests.

    Args:
        longest: Most tokens of a chunk.
        budget: Most tokens of a batch, at least ``longest``.
        most_requests: Most chunks of a batch.

    Returns:
        The lengths of the chunks of each batch.
    """
    budget = min(budget, longest * most_requests)
    most = min(most_requests, budget)
    powers = [1 << bits for bits in range(budget.bit_length())]
    totals = {longest, budget, *powers, *(power - 1 for power in powers if power >= 16)}
    parts = [divmod(total, longest) for total in sorted(totals)]
    batches = [[longest] * full + [rest] * (rest > 0) for full, rest in parts]
    for count in sorted({most, *(power for power in powers if power < most)} - {1}):
        widest = min(longest, budget - count + 1)
        widths = *(power for power in powers if power < widest), widest
        batches += [[width] + [1] * (count - 1) for width in widths]
    return batches
