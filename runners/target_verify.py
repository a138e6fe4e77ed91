"""TARGET_VERIFY: the target scores the drafted tokens of every request in one forward."""

from __future__ import annotations

from typing import Any

from graphkit.buffers import TargetVerifyInputBuffers
from graphkit.errors import ConfigError
from graphkit.runners.outputs import ForwardOutput
from graphkit.runners.runner import Runner
from graphkit.spec import ForwardMode, SpecConfig


class TargetVerifyRunner(Runner[ForwardOutput]):
    """Verifies a chain (topk 1) or a tree (topk > 1, with ``custom_mask``) per request.

    Rows per request are what the algorithm's ``get_num_tokens_per_bs_for_target_verify`` says.
    Arguments as in ``Runner``.

    Raises:
        ConfigError: ``spec`` is a draft worker's, and its algorithm does not let one verify.
    """

    mode = ForwardMode.TARGET_VERIFY
    buffers_type = TargetVerifyInputBuffers
    output_type = ForwardOutput

    def __init__(self, forward: Any, *, spec: SpecConfig, **options: Any) -> None:
        if spec.is_draft_worker and not spec.resolved.supports_target_verify_for_draft():
            raise ConfigError(
                f"a draft worker may not capture TARGET_VERIFY with {spec.resolved!r}: its "
                "supports_target_verify_for_draft() is False. Override it, or capture on the "
                "target's worker.",
                field="is_draft_worker",
            )
        super().__init__(forward, spec=spec, **options)

    def implied_fields(self) -> tuple[str, ...]:
        """A tree needs its mask."""
        return ("custom_mask",) if self.spec.topk > 1 else ()
