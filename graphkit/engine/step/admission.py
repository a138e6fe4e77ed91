"""Admission of requests: checks of what a caller passes, and the prefill of the prompt.

``SpeculativeEngine`` and ``SpecStepRunner.admit`` both admit requests through ``Admission``. The
engine allocates rows and KV slots itself; ``SpecStepRunner.admit`` checks those of its caller.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from graphkit.engine.step.device_copies import copied_to, to_device
from graphkit.engine.step.prefill_batch import PrefillBatch
from graphkit.engine.step.sampling_params import SamplingParams
from graphkit.engine.step.spec_step import SpecStep
from graphkit.errors import InputError, short_repr
from graphkit.graphs import Backend
from graphkit.ops.logits import bitmask_words
from graphkit.runners.attention_check import check_attention


@dataclass(eq=False, slots=True)
class Prefill:
    """A prompt on its way into the KV pool.

    Attributes:
        row: The request row.
        sampling: Parameters of the request.
        max_new_tokens: Most tokens to generate, the context limit included.
        token_ids: The prompt, or prompt and output of a request that runs again.
        bitmask: Tokens that may be the first new one, [1, ceil(V / 32)] int32 on the CPU; ``None``
            allows all.
        num_outputs: How many of the last ``token_ids`` are output.
        done: Tokens that have been prefilled.
    """

    row: int
    sampling: SamplingParams
    max_new_tokens: int
    token_ids: Sequence[int]
    bitmask: torch.Tensor | None = None
    num_outputs: int = 0
    done: int = 0

    @property
    def left(self) -> int:
        """Tokens that have not been prefilled."""
        return len(self.token_ids) - self.done

    def tokens(self, count: int) -> list[int]:
        """Return the next tokens and the one behind them, which is 0 behind the prompt."""
        tokens = list(self.token_ids[self.done : self.done + count + 1])
        return tokens if len(tokens) > count else [*tokens, 0]


class Admission:
    """Checks requests, and prefills their prompts in packed chunks with target and drafter.

    Chunks run eagerly: their lengths are not captured widths.

    Args:
        spec_step: The step that continues the requests.
        context_limit: Most tokens of a prompt and its output together.
        seed: Gives a different seed to each request that has none.
        bos_token_id: Replaces an empty prompt; with ``None``, an empty prompt is an error.

    Attributes:
        context_limit: As passed.
        vocab_size: Tokens of the target's vocabulary.
    """

    def __init__(
        self,
        spec_step: SpecStep,
        context_limit: int,
        *,
        seed: int = 0,
        bos_token_id: int | None = None,
    ) -> None:
        context = spec_step.context
        self._step, self._chunk_size = spec_step, context.options.chunked_prefill_size
        self.context_limit, self.vocab_size = context_limit, context.sizes.vocab_size
        self._seed, self._bos, self._checked = seed, bos_token_id, 0
        self._compares_attention = context.options.check is not False
        self._packs = all(runner.step.packs_rows for runner in spec_step.runners)

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

    def chunks(self, prefills: Iterable[Prefill]) -> list[tuple[Prefill, int]]:
        """Return which prompts the next forward continues, and by how many tokens each.

        There are up to ``chunked_prefill_size`` tokens in all. Half of them belong to the prompt
        that was admitted first, the others to the shortest ones; what one side leaves, the other
        takes. So a long prompt neither holds up the short ones behind it nor waits for all of them.

        Args:
            prefills: Prompts that are not complete, in order of admission.
        """
        first, *others = prefills
        budget = self._chunk_size
        if not self._packs:
            return [(first, min(first.left, budget))]
        counts = {first: min(first.left, budget - budget // 2)}
        room = budget - counts[first]
        for each in sorted(others, key=lambda prefill: prefill.left):
            if not room:
                break
            counts[each] = min(each.left, room)
            room -= counts[each]
        counts[first] += min(first.left - counts[first], room)
        return [(each, counts[each]) for each in (first, *others) if each in counts]

    def prefill(self, chunks: Sequence[tuple[Prefill, int]]) -> torch.Tensor | None:
        """Prefill chunks of prompts in one forward of the target. Does not wait.

        Complete prompts take part in the next step. After an exception, the same chunks can be
        prefilled again.

        Args:
            chunks: Prompts, and the tokens by which each is continued. Their KV slots are in
                ``req_to_token``.

        Returns:
            The reports of the first new tokens of the prompts that are complete, [complete, 6]
            int32 on the device; ``None`` if none is complete.
        """
        self._check_attention()
        complete = [each for each, count in chunks if count == each.left]
        if complete:
            self._step.state.assign(
                [each.row for each in complete],
                [each.token_ids for each in complete],
                [each.sampling for each in complete],
                [each.max_new_tokens for each in complete],
                [each.num_outputs for each in complete],
            )
        rows, starts = [each.row for each, _ in chunks], [each.done for each, _ in chunks]
        batch = self._packed(rows, starts, [each.tokens(count) for each, count in chunks])
        is_new = [place for place, start in enumerate(starts) if start == 0]
        ended = [place for place, (each, count) in enumerate(chunks) if count == each.left]
        report = self._forward(
            batch,
            is_new,
            ended,
            is_greedy=not any(each.sampling.temperature for each in complete),
            bitmask=self._bitmask(complete),
        )
        for each, count in chunks:
            each.done += count
        return report

    def warm_up(self, backend: Backend) -> None:
        """Prefill pads of row 0, so that all state exists and the kernels of prompts are compiled.

        Args:
            backend: Backend of the graphs that are captured next.

        Raises:
            AttentionError: See ``Runner.capture``.
            CaptureError: A forward raised an exception.
        """
        self._check_attention()
        sizes = self._step.context.sizes
        # A prompt leaves room for a token, which a draft model may process with it.
        longest = max(1, min(self._chunk_size, self.context_limit - 1))
        batches = [[1], [longest]]
        if backend.device.type == "cuda":
            most = sizes.max_batch_size if self._packs else 1
            batches = warm_up_chunks(longest, self._chunk_size, most)
        runs = [partial(self._run_pads, lengths, is_greedy=True) for lengths in batches]
        # How the first token is chosen depends on the number of requests alone.
        ones = [lengths for lengths in batches if set(lengths) == {1}]
        runs += [partial(self._run_pads, lengths, is_greedy=False) for lengths in ones]
        self._step.warm_up(backend, runs)

    def _check_attention(self) -> None:
        """Compare trees and packed prefills with chains, once."""
        if self._compares_attention and self._step.context.options.group is None:
            verifier = self._step.verifier
            check_attention(verifier.runner, verifier.recurrent_state)
        self._compares_attention = False

    def _run_pads(self, lengths: Sequence[int], *, is_greedy: bool) -> None:
        """Run all that ``prefill`` does for prompts of the row of pads."""
        pads = [0] * len(lengths)
        batch = self._packed(pads, pads, [[0] * (length + 1) for length in lengths])
        allowed = self._step.verifier.all_allowed(1)
        bitmask = None if allowed is None else allowed.expand(len(lengths), -1)
        self._forward(batch, [0], range(len(lengths)), is_greedy=is_greedy, bitmask=bitmask)

    def _packed(
        self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> PrefillBatch:
        """Return chunks as one batch.

        Args:
            rows: Request row of each.
            starts: Position of its first token.
            tokens: Its tokens and the one behind them.
        """
        lengths = [len(each) - 1 for each in tokens]
        total, count = sum(lengths), len(rows)
        spans = zip(starts, lengths, strict=True)
        parts = [
            [row for row, length in zip(rows, lengths, strict=True) for _ in range(length)],
            [position for start, length in spans for position in range(start, start + length)],
            [token for each in tokens for token in each[:-1]],
            [token for each in tokens for token in each[1:]],
            rows,
            lengths,
        ]
        context = self._step.context
        numbers = to_device([*chain(*parts)], context.device)  # in one copy
        row_indices, positions, input_ids, next_ids = numbers[: 4 * total].view(4, -1)
        row, length = numbers[4 * total :].view(2, count)
        return PrefillBatch(
            req_pool_indices=row,
            starts=starts,
            lengths=lengths,
            are_last=[],
            device_lengths=length.int(),
            row_indices=row_indices,
            positions=positions,
            input_ids=input_ids,
            next_ids=next_ids,
            out_cache_loc=context.req_to_token[row_indices, positions].long(),
            hidden_states=None,
        )

    def _forward(
        self,
        batch: PrefillBatch,
        new: Sequence[int],
        complete: Sequence[int],
        *,
        is_greedy: bool,
        bitmask: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run target and drafter over a batch; see ``prefill``.

        Args:
            batch: The chunks, without hidden states.
            new: Which of the requests begin.
            complete: Which of them have their whole prompt then.
            is_greedy: Whether the temperature of all complete ones is 0.
            bitmask: Tokens that may follow the complete ones; ``None`` allows all.
        """
        step, device = self._step, self._step.context.device
        rows, last_rows = batch.req_pool_indices, batch.last_rows
        begun = rows[to_device(new, device)] if new else None
        output = step.verifier.prefill(batch.target_inputs(), begun)
        first = logits = log_sums = None
        if complete:
            index = to_device(complete, device)
            rows, last_rows = rows[index], last_rows[index]
            logits = output.next_token_logits[last_rows]
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
        if not any(each.bitmask is not None for each in complete):
            return None
        every = torch.full((1, bitmask_words(self.vocab_size)), -1, dtype=torch.int32)
        masks = [every if each.bitmask is None else each.bitmask for each in complete]
        return copied_to(self._step.context.device, torch.cat(masks))

    def _valid_sampling(self, sampling: object) -> SamplingParams:
        if sampling is None:
            return SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise InputError(
                f"sampling must be a graphkit.SamplingParams or None, got {short_repr(sampling)}.",
                field="sampling",
            )
        biases = sampling.logit_bias or {}
        for field, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", biases)):
            largest = max(ids, default=0)
            if largest >= self.vocab_size:
                raise InputError(
                    f"SamplingParams.{field} has {largest}, but the vocabulary has "
                    f"{self.vocab_size} tokens. Use ids from 0 to {self.vocab_size - 1}.",
                    field=field,
                )
        excluded = {token for token, bias in biases.items() if bias == -math.inf}
        if sampling.min_tokens:
            excluded.update(sampling.stop_token_ids)
        if len(excluded) == self.vocab_size:
            raise InputError(
                "SamplingParams.logit_bias, with the stop tokens of min_tokens, excludes all "
                f"{self.vocab_size} tokens of the vocabulary. Leave one.",
                field="logit_bias",
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


def _prompt_error(fact: str, remedy: str) -> InputError:
    return InputError(f"the prompt {fact}. {remedy}", field="prompt_ids")
