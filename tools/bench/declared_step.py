"""A STEP for a target of the reference models, which have forwards for all other modes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

import graphkit as gk


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
            return target.sample_batch(mode, batch_size, seed)
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
