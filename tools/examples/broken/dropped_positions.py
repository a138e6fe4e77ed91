"""A wrapper that does not pass positions to its model.

graphkit audit tools.examples.broken.dropped_positions:target

Error: without ``position_ids`` the model numbers the rows of each forward from 0.
Effect: prompts that are prefilled at once are right, and every step after them is wrong. Every
replay equals the wrapper without a graph, so that only a comparison with the model finds it.
"""

from __future__ import annotations

from dataclasses import replace

import graphkit as gk
from tools.examples.transformers_models import NO_MASK, random_model, wrapped


def target(device: str = "cpu") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    model = random_model("llama")
    made = wrapped(model, device)

    def forward(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Return the logits of the draft tokens."""
        output = model(
            input_ids=inputs.input_ids[None],
            attention_mask=NO_MASK,
            use_cache=False,
            inputs=inputs,
            backend=made.attention,
        )
        return gk.ForwardOutput(next_token_logits=output.logits[0])

    return replace(made, forwards={gk.ForwardMode.TARGET_VERIFY: forward})
