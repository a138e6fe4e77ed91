"""The device's part of a step, which both generations share: draft, verify, store for the next."""

from __future__ import annotations

from typing import Any

import torch

from graphkit.engine.context import EngineContext, EngineModel
from graphkit.engine.drafter import Drafter
from graphkit.engine.drafter_checks import check_methods, check_prepared, check_tree
from graphkit.engine.step_tensors import Verified
from graphkit.engine.verifier import RunningBatch, Verifier
from graphkit.runners import Runner


class DeviceStep:
    """Drafts and verifies. Every method only enqueues work; none waits for the device.

    Args:
        target: The model whose output the requests receive.
        drafter: Prepared here.
        context: The engine's.
        generator: Source of random numbers for requests with a temperature.

    Attributes:
        runners: The runner of each mode, the target's first.
        slots_ahead: KV slots that one step writes behind the committed tokens of a request.
        max_path: Most tokens that one step can accept, bonus included.

    Raises:
        ConfigError: The drafter does not implement ``Drafter``, or its settings are invalid.
    """

    def __init__(
        self,
        target: EngineModel,
        drafter: Drafter,
        context: EngineContext,
        generator: torch.Generator,
    ) -> None:
        check_methods(drafter)
        drafter.prepare(context)
        check_prepared(drafter)
        self.drafter, self.context = drafter, context
        self.max_path = min(drafter.max_path, context.verify_width)
        self.verifier = verifier = Verifier(target, context, self.max_path, generator)
        self.runners: tuple[Runner[Any, Any], ...] = (verifier.runner, *drafter.runners)
        self.slots_ahead = max(context.verify_width, drafter.slots_needed)

    def start(self, req_pool_indices: torch.Tensor, length: int, first_token: torch.Tensor) -> None:
        """Store the length of a prefilled prompt and its first new token for the first step."""
        lengths = torch.full_like(req_pool_indices, length, dtype=torch.int32)
        self._stash(req_pool_indices, lengths, first_token)

    def draft_and_verify(self, batch: RunningBatch) -> Verified:
        """Draft, verify and store the new lengths and bonus tokens for the next step.

        Raises:
            InputError: The drafter returned an invalid tree.
        """
        rows, resolve = batch.req_pool_indices, self.context.future_map.resolve
        seq_lens, bonus = resolve("seq_lens", rows), resolve("bonus_tokens", rows)
        tree = self.drafter.draft(rows, seq_lens, bonus)
        check_tree(self.drafter, tree, seq_lens, self.context)
        verified = self.verifier.verify(batch, seq_lens, bonus, tree)
        self._stash(rows, verified.new_seq_lens, verified.bonus_tokens)
        return verified

    def accepted_tokens(self, verified: Verified) -> torch.Tensor:
        """Return the tokens of each accepted path, [B, longest path]; the rest is undefined."""
        predict = verified.predict.view(len(verified.seq_lens), -1)
        return predict[:, : self.max_path]

    def _stash(self, rows: torch.Tensor, seq_lens: torch.Tensor, bonus: torch.Tensor) -> None:
        self.context.future_map.stash(rows, {"seq_lens": seq_lens, "bonus_tokens": bonus})
