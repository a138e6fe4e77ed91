"""Sample batches of each forward mode, drawn from prefilled requests.

The runner classes say where the rows of a batch are; this module adds token ids and hidden states.
Hidden states are on the device, as in an engine. All other fields are numpy arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.buffers import DraftExtendInputs, DraftInputs, Field, StepInputs, fields_of
from graphkit.models.sharded.prefilled_requests import PrefilledRequests
from graphkit.runners import RUNNERS, Runner
from graphkit.runners.sample_rows import SampleRows
from graphkit.spec import ForwardMode

IntArray = NDArray[np.int64]


class SampleBatches:
    """Draws batches of random requests, deterministic for the same arguments.

    Half of the draft tokens continue the text, as correct drafts do; the others are random bytes.

    Args:
        requests: Prefilled by the models of all modes that are drawn.
    """

    def __init__(self, requests: PrefilledRequests) -> None:
        self.requests, self._spec = requests, requests.spec

    def __call__(self, mode: ForwardMode, batch_size: int, seed: int) -> StepInputs:
        """Return a batch, as ``CaptureTarget.sample_batch`` requires."""
        runner = RUNNERS[mode]
        inputs_type = runner.inputs_type
        random = np.random.default_rng([seed, batch_size, list(RUNNERS).index(mode)])
        chosen = random.permutation(self.requests.count)[:batch_size]
        sample = self._sample_rows(runner, chosen, random)
        values: dict[str, Any] = {**runner.sample_fields(self._spec, sample)}
        del values["mrope_positions"]  # the reference models do not read them
        if issubclass(inputs_type, DraftInputs):
            values |= self._draft_state(chosen)
        else:
            values |= self._row_contents(inputs_type, chosen, sample, values, random)
        return inputs_type(
            **{
                field.name: _cast(values[field.name], field)
                for field in fields_of(inputs_type)
                if field.name in values
            }
        )

    def _sample_rows(
        self, runner: type[Runner[Any, Any]], chosen: IntArray, random: np.random.Generator
    ) -> SampleRows:
        """Draw how many tokens each request accepted, and its tree in TARGET_VERIFY."""
        parents, width = None, runner.width(self._spec)
        if runner.mode is ForwardMode.TARGET_VERIFY and self._spec.topk > 1:
            bounds = np.maximum(np.arange(width), 1)
            parents = random.integers(0, bounds, (len(chosen), width))
        return SampleRows(
            rows=self.requests.rows[chosen],
            committed=self.requests.lengths[chosen],
            accepted=random.integers(1, self._spec.num_steps + 2, len(chosen)),
            slots=self.requests.slots,
            parents=parents,
        )

    def _draft_state(self, chosen: IntArray) -> dict[str, Any]:
        """Return the candidates and hidden states that DRAFT starts from."""
        requests = self.requests
        return {
            "topk_p": requests.topk_p[chosen],
            "topk_index": requests.topk_index[chosen],
            "hidden_states": requests.hidden_states[requests.on_device(chosen)],
        }

    def _row_contents(
        self,
        inputs_type: type[StepInputs],
        chosen: IntArray,
        sample: SampleRows,
        values: dict[str, Any],
        random: np.random.Generator,
    ) -> dict[str, Any]:
        """Return token ids and hidden states of the rows behind each prefix."""
        requests, counts = self.requests, values["extend_seq_lens"]
        owner = chosen.repeat(counts)
        row = np.concatenate([np.arange(count) for count in counts])
        position = sample.committed.repeat(counts) + row
        if not issubclass(inputs_type, DraftExtendInputs):
            tokens = requests.texts[owner, position]
            return {"input_ids": _corrupt_half(tokens, row > 0, random)}
        # Draft models run one token ahead. Rows behind the accepted ones are arbitrary.
        tokens = requests.texts[owner, position + 1]
        is_rejected = row >= sample.accepted.repeat(counts)
        features = requests.features[requests.on_device(owner), requests.on_device(position)]
        return {
            "input_ids": _corrupt_half(tokens, is_rejected, random),
            "hidden_states": features,
        }


def _corrupt_half(
    tokens: IntArray, is_draft: NDArray[np.bool_], random: np.random.Generator
) -> IntArray:
    """Replace half of the draft tokens by random bytes."""
    is_replaced = (random.random(tokens.shape) < 0.5) & is_draft
    return np.where(is_replaced, random.integers(0, 128, tokens.shape), tokens)


def _cast(value: Any, field: Field) -> Any:
    """Cast an array to the dtype of its field; return tensors as they are."""
    if isinstance(value, np.ndarray) and isinstance(field.dtype, torch.dtype):
        return torch.from_numpy(value).to(field.dtype).numpy()
    return value
