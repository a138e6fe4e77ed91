"""A STEP for a target of the reference models, and batches that do not depend on each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

import graphkit as gk
from graphkit.runners import RUNNERS
from graphkit.runners.mode_declaration import SampleRows


@dataclass(kw_only=True, eq=False)
class HeadInputs(gk.StepInputs):
    """A field on the device, and host fields per request and per token."""

    hidden_states: gk.Rows = gk.declare(
        gk.Axis.REQUEST, gk.MODEL_DTYPE, "of the last accepted row", row=("H",), by_address=True
    )
    temperatures: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.float32, "of sampling", pad=1)
    input_ids: gk.Rows = gk.declare(gk.Axis.TOKEN, torch.int64, "the tokens after that row")


@dataclass(kw_only=True, eq=False)
class HeadOutput(gk.Output):
    """Scores of each token [T, V], and the best score of each request [B]."""

    scores: torch.Tensor = gk.declare_output(gk.Axis.TOKEN, row=("V",))
    best: torch.Tensor = gk.declare_output(gk.Axis.REQUEST, row=())


def steady_batch(
    target: gk.CaptureTarget, mode: gk.ForwardMode, batch_size: int, seed: int
) -> gk.StepInputs:
    """Return a random batch whose requests have the same prefixes in every batch of every mode.

    No batch then writes keys and values that another one reads, so that results do not depend on
    the order of replays.
    """
    batch, runner = target.batch(mode, batch_size, seed), RUNNERS[mode]
    attention = target.attention[mode]
    rows = np.asarray(batch.req_pool_indices).astype(np.int64)
    counts = getattr(batch, "num_accepted_tokens", np.ones(batch_size, np.int64))
    width = runner.width(target.spec)
    is_tree = getattr(batch, "custom_mask", None) is not None
    sample = SampleRows(
        rows=rows,
        committed=8 + 7 * rows % 40,
        accepted=np.asarray(counts).astype(np.int64),
        slots=attention.req_to_token_pool.req_to_token.cpu().numpy().astype(np.int64),
        parents=np.tile(np.maximum(np.arange(width) - 1, 0), (batch_size, 1)) if is_tree else None,
    )
    places = runner.sample_fields(target.spec, sample)
    own = {name: values for name, values in vars(batch).items() if values is not None}
    changed = {
        name: np.asarray(places[name]).astype(np.asarray(own[name]).dtype)
        for name in own.keys() & places.keys()
    }
    return replace(batch, **changed)


def with_declared_step(target: gk.CaptureTarget) -> gk.CaptureTarget:
    """Return the target with a forward for STEP: a head over a hidden state and some tokens."""
    sizes, width = target.sizes, target.spec.num_draft_tokens
    device = next(iter(target.mutable_state.values())).device
    shape = (sizes.vocab_size, sizes.hidden_size)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = weight.to(device, sizes.dtype)

    def head(inputs: HeadInputs) -> HeadOutput:
        embeds = torch.nn.functional.embedding(inputs.input_ids, weight)
        rows = embeds.unflatten(0, (inputs.batch_size, -1)) + inputs.hidden_states[:, None]
        scores = rows @ weight.T / inputs.temperatures[:, None, None].to(weight.dtype)
        return HeadOutput(scores=scores.flatten(0, 1), best=scores.amax((1, 2)))

    def sample(mode: gk.ForwardMode, batch_size: int, seed: int) -> gk.StepInputs:
        if mode is not gk.ForwardMode.STEP:
            return steady_batch(target, mode, batch_size, seed)
        random = np.random.default_rng([seed, batch_size])
        hidden = torch.from_numpy(random.standard_normal((batch_size, sizes.hidden_size)))
        return HeadInputs(
            hidden_states=hidden.to(device, sizes.dtype),
            temperatures=random.random(batch_size, dtype=np.float32) + 0.5,
            input_ids=random.integers(sizes.vocab_size, size=batch_size * width),
        )

    return replace(
        target,
        forwards={**target.forwards, gk.ForwardMode.STEP: head},
        sample_batch=sample,
        inputs_type={gk.ForwardMode.STEP: HeadInputs},
        output_type={gk.ForwardMode.STEP: HeadOutput},
        engine=None,
    )
