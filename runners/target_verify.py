"""TARGET_VERIFY: the target scores the drafted tokens of all requests in one forward.

DECODE is the same with one token per request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from graphkit.buffers import TargetVerifyInputs
from graphkit.errors import ConfigError, short_repr
from graphkit.graphs import scope
from graphkit.ops.logits import apply_token_bitmask
from graphkit.runners.mode_declaration import SampleRows
from graphkit.runners.outputs import ForwardOutput
from graphkit.runners.runner import Runner
from graphkit.runners.step import Step, rows_at
from graphkit.spec import ForwardMode, SpecConfig


class MaskedStep(Step[ForwardOutput]):
    """The forward, then ``apply_token_bitmask`` if the batch has one."""

    def whole(self, inputs: Any) -> ForwardOutput:
        """See ``Step.whole``. The forward's logits are changed in place.

        With ``logit_rows``, the output has the logits of these rows alone.
        """
        output = super().whole(inputs)
        if inputs.logit_rows is not None:
            logits = rows_at(inputs.logit_rows, inputs.num_tokens, output.next_token_logits)
            output = replace(output, next_token_logits=logits)
        if inputs.token_bitmask is not None:
            with scope("mask"):
                apply_token_bitmask(output.next_token_logits, inputs.token_bitmask)
        return output


class TargetVerifyRunner(Runner[TargetVerifyInputs, ForwardOutput]):
    """Verifies a chain (topk 1) or a tree (topk > 1, with ``custom_mask``) per request.

    In a draft worker of DFLASH, the draft model fills a block per request. Its rows see later ones
    with ``custom_mask`` among the ``optional_fields`` or the ``bound_fields``.

    The algorithm's ``get_num_tokens_per_bs_for_target_verify`` gives the rows per request. With
    ``token_bitmask`` among the ``optional_fields``, a batch says what tokens may follow each row,
    and the logits of all others are -inf. See ``Runner`` for the arguments.

    Raises:
        ConfigError: ``spec`` belongs to a draft worker, and its algorithm does not let one verify.
    """

    mode = ForwardMode.TARGET_VERIFY
    inputs_type = TargetVerifyInputs
    output_type = ForwardOutput
    step_type = MaskedStep

    def _check_spec(self, spec: SpecConfig) -> None:
        if spec.is_draft_worker and not spec.resolved.supports_target_verify_for_draft():
            raise ConfigError(
                f"a draft worker cannot capture TARGET_VERIFY with {short_repr(spec.resolved)}: "
                "supports_target_verify_for_draft() is False. Override it, or capture on the "
                "target's worker.",
                field="is_draft_worker",
            )

    @property
    def label(self) -> str:
        """The mode's name, preceded by ``draft`` in a draft worker."""
        return f"draft {self.mode.name}" if self.spec.is_draft_worker else self.mode.name

    @classmethod
    def sample_fields(cls, spec: SpecConfig, rows: SampleRows) -> dict[str, Any]:
        """See ``Runner.sample_fields``. All rows of a block see each other."""
        if not (spec.is_draft_worker and spec.resolved.is_dflash()):
            return super().sample_fields(spec, rows)
        width = cls.width(spec)
        mask = np.ones((len(rows.rows), width, width), dtype=np.bool_)
        return super().sample_fields(spec, replace(rows, parents=None)) | {"custom_mask": mask}

    def implied_fields(self) -> tuple[str, ...]:
        """Return the mask of a tree."""
        return ("custom_mask",) if self.spec.topk > 1 else ()


class DecodeRunner(Runner[TargetVerifyInputs, ForwardOutput]):
    """Decodes one token per request: ``TargetVerifyInputs`` with T = B.

    ``token_bitmask`` works as for ``TargetVerifyRunner``.
    See ``Runner`` for the arguments. Of ``spec`` only the algorithm's name is read.
    """

    mode = ForwardMode.DECODE
    inputs_type = TargetVerifyInputs
    output_type = ForwardOutput
    step_type = MaskedStep
