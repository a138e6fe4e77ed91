"""A verify step with an additional input field: the sampling temperature of each request.

Buffers, padding, the copy to the device, audits and test strategies read its declaration.

graphkit audit tools.examples.declared_field:target
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import graphkit as gk
from graphkit.buffers import Axis, Rows, declare
from graphkit.models.reference import reference_target

VERIFY = gk.ForwardMode.TARGET_VERIFY


@dataclass(kw_only=True, eq=False)
class SampledVerifyInputs(gk.TargetVerifyInputs):
    """The fields of TARGET_VERIFY and one more; pad rows get temperature 1."""

    temperatures: Rows = declare(Axis.REQUEST, torch.float32, "temperature", pad=1)


def target(device: str = "cpu") -> gk.CaptureTarget:
    """Create the target: the reference model, its logits divided by the temperatures."""
    base = reference_target(device)

    def forward(inputs: SampledVerifyInputs) -> gk.ForwardOutput:
        logits = base.forwards[VERIFY](inputs).next_token_logits
        per_request = logits.unflatten(0, (-1, inputs.tokens_per_request))
        scaled = per_request / inputs.temperatures[:, None, None]
        return gk.ForwardOutput(next_token_logits=scaled.flatten(0, 1))

    def sample_batch(mode: gk.ForwardMode, batch_size: int, seed: int) -> SampledVerifyInputs:
        batch = base.batch(mode, batch_size, seed)
        return SampledVerifyInputs(**vars(batch), temperatures=torch.linspace(0.5, 2, batch_size))

    # The forward is no longer that of the model, so that there is none to compare it with.
    fields = {"forwards": {VERIFY: forward}, "inputs_type": SampledVerifyInputs, "model": None}
    return replace(base, name="declared field", sample_batch=sample_batch, engine=None, **fields)


def main() -> int:
    """Replay 3 requests at size 4 and compare with the eager forward; the graph pads the field."""
    sampled = target()
    with sampled.runner(VERIFY, batch_sizes=[4], device="cpu") as runner:
        runner.capture()
        batch = sampled.batch(VERIFY, 3, 0)
        replayed = runner.replay(batch).next_token_logits.clone()
        eager = runner.fall_back(batch).next_token_logits
    for temperature, row in zip(batch.temperatures.tolist(), replayed[::4], strict=True):
        print(f"temperature {temperature}: highest probability {row.softmax(0).max():.3f}")
    return 0 if torch.allclose(replayed, eager, atol=1e-4) else 1


if __name__ == "__main__":
    raise SystemExit(main())
