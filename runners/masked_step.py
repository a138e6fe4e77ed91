"""A target's step, which applies the token bitmask of its batch to the logits."""

from __future__ import annotations

from typing import Any

from graphkit.graphs import scope
from graphkit.ops import apply_token_bitmask
from graphkit.runners.outputs import ForwardOutput
from graphkit.runners.step import Step


class MaskedStep(Step[ForwardOutput]):
    """The forward, then ``apply_token_bitmask`` if the batch has one."""

    def whole(self, inputs: Any) -> ForwardOutput:
        """See ``Step.whole``. The forward's logits are changed in place."""
        output = super().whole(inputs)
        if inputs.token_bitmask is not None:
            with scope("mask"):
                apply_token_bitmask(output.next_token_logits, inputs.token_bitmask)
        return output
