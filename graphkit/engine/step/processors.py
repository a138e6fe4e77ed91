"""Processors of logits of every request on the device, by request row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from graphkit.engine.step.sampling_params import MAX_BIASED_IDS, SamplingParams
from graphkit.graphs.devices import copied_to, to_device
from graphkit.ops.processors import Kind, process_logits

_MAX_INT = 2**31 - 1


class TargetLogits(NamedTuple):
    """Logits of the target's rows, and what the processors of their requests make of them.

    Shapes:
        logits: [N, V], before processors.
        processed: [N, V], see ``ops.processors``; ``None`` if no processors ran.
        is_processed: [N] bool, the rows that ``processed`` replaces.
        log_sums: [N, C] float32.
    """

    logits: torch.Tensor
    processed: torch.Tensor | None = None
    is_processed: torch.Tensor | None = None
    log_sums: torch.Tensor | None = None


class LogitsProcessors:
    """Biases, least lengths and penalties of requests; see ``graphkit.ops.processors``.

    A row takes 4 bytes per token of the vocabulary, and 8 KiB. Rows of requests without processors
    are not read, and keep what they had.

    Args:
        rows: Request rows, row 0 excluded, which never has processors.
        vocab_size: Tokens of the vocabulary (V).
        device: Device of the tensors.

    Attributes:
        kinds: [rows + 1] int32, see ``ops.processors.Kind``.
        token_counts: [rows + 1, V] int32, twice the occurrences of each token in the output, plus 1
            if the prompt contains it.
        penalties: [rows + 1, 3] float32: repetition, presence and frequency penalty.
        bias_ids: [rows + 1, 1024] int32, tokens with a bias, padded with -1.
        biases: [rows + 1, 1024] float32.
        least_lens: [rows + 1] int32, tokens of prompt and output before a stop token may follow.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        size, ids = rows + 1, MAX_BIASED_IDS
        self.kinds = torch.zeros(size, dtype=torch.int32, device=device)
        self.token_counts = torch.zeros(size, vocab_size, dtype=torch.int32, device=device)
        self.penalties = torch.zeros(size, 3, dtype=torch.float32, device=device)
        self.bias_ids = torch.full((size, ids), -1, dtype=torch.int32, device=device)
        self.biases = torch.zeros(size, ids, dtype=torch.float32, device=device)
        self.least_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self._device = device

    def assign(self, row: int, sampling: SamplingParams, prompt: Sequence[int],
               output: Sequence[int]) -> None:  # fmt: skip
        """Set counts and biases of a request that has such processors; enqueues only.

        Args:
            row: The request row.
            sampling: Parameters of the request.
            prompt: Its prompt.
            output: Its output so far, if it was admitted before.
        """
        if kind_of(sampling) & Kind.PENALTIES:
            counts = self.token_counts[row]
            counts.zero_()
            counts.index_fill_(0, to_device(prompt, self._device), 1)
            if output:
                tokens = to_device(output, self._device)
                counts.index_add_(0, tokens, torch.full_like(tokens, 2, dtype=torch.int32))
        if sampling.logit_bias:
            behind = MAX_BIASED_IDS - len(sampling.logit_bias)
            ids = [*sampling.logit_bias, *[-1] * behind]
            biases = np.array([*sampling.logit_bias.values(), *[0.0] * behind], np.float32)
            numbers = torch.stack((torch.tensor(ids, dtype=torch.int32),
                                   torch.from_numpy(biases).view(torch.int32)))  # fmt: skip
            ids_and_bits = copied_to(self._device, numbers)
            self.bias_ids[row] = ids_and_bits[0]
            self.biases[row] = ids_and_bits[1].view(torch.float32)

    def process(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        candidates: torch.Tensor,
        tree_mask: torch.Tensor | None,
        positions: torch.Tensor,
        stop_ids: torch.Tensor,
        nodes: torch.Tensor | None = None,
    ) -> TargetLogits:
        """Process the logits of the target's rows; see ``process_logits`` for the arguments."""
        return TargetLogits(
            logits,
            *process_logits(
                logits, rows, candidates, tree_mask, positions, self.kinds, self.token_counts,
                self.penalties, self.bias_ids, self.biases, self.least_lens, stop_ids,
                nodes,
            ),
        )  # fmt: skip


def kind_of(sampling: SamplingParams) -> Kind:
    """Return the processors that a request has."""
    is_penalised = (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
    kind = Kind.PENALTIES * is_penalised | Kind.BIAS * bool(sampling.logit_bias)
    kind |= Kind.LEAST_LENGTH * bool(sampling.min_tokens and sampling.stop_token_ids)
    return Kind(kind | Kind.LOGPROBS * sampling.logprobs)


def least_length(sampling: SamplingParams, prompt_length: int) -> int:
    """Return the tokens of prompt and output before a stop token may follow."""
    return min(prompt_length + sampling.min_tokens, _MAX_INT)
