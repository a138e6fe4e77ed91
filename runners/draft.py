"""DRAFT: the draft model proposes a tree, all its steps unrolled in one graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from graphkit.buffers import DraftInputBuffers, DraftInputs, Inputs
from graphkit.errors import ConfigError
from graphkit.runners.outputs import DraftOutput
from graphkit.runners.runner import Runner
from graphkit.runners.step import Step, rows_of
from graphkit.spec import ForwardMode, SpecConfig
from graphkit.spec.tree import TreeGrowth, top_candidates


class DraftStep(Step[DraftOutput]):
    """S steps of the tree. The candidates of the first come with the batch: S - 1 forwards."""

    def whole(self, inputs: Inputs) -> DraftOutput:
        """Grow the tree and choose its nodes. The inputs are left as they were found."""
        assert isinstance(inputs, DraftInputs), "the runner's buffers are those of DRAFT"
        tree = TreeGrowth(inputs.topk_p, inputs.topk_index)
        hidden_states, mask = _per_branch(inputs.hidden_states, self.spec.topk), None
        for step in range(self.spec.num_steps - 1):
            mask = self._mask(mask, tree.parents, step)
            view = self._view(inputs, step)
            view.input_ids, view.hidden_states = tree.tokens.flatten(), hidden_states
            view.custom_mask = mask
            self.attend(view, replace(view, seq_lens=inputs.seq_lens + self._drafted_before(step)))
            logits, made = rows_of(self.forward(view), {"token": view.num_tokens})
            tree.grow(*top_candidates(logits, self.spec.topk))
            hidden_states = _of_parents(made, tree.parents)
        parent_list, top_scores_index, draft_tokens = tree.best(self.spec.num_draft_tokens)
        return DraftOutput(
            parent_list=parent_list, top_scores_index=top_scores_index, draft_tokens=draft_tokens
        )

    def _view(self, inputs: DraftInputs, step: int) -> DraftInputs:
        """What the forward of one step sees: a row per branch."""
        slots = inputs.out_cache_loc.view(inputs.batch_size, -1, self.spec.num_steps)
        mrope = inputs.mrope_positions
        return replace(
            inputs,
            positions=inputs.positions + step,
            out_cache_loc=slots[:, :, step].flatten(),
            mrope_positions=None if mrope is None else mrope + step,
        )

    def _drafted_before(self, step: int) -> int:
        """Draft slots between the committed tokens and the rows that metadata appends.

        A chain's rows follow one another. A tree's branches lie S slots apart, so its mask speaks
        of all K * S draft slots at once.
        """
        topk, steps = self.spec.topk, self.spec.num_steps
        return step if topk == 1 else topk * (steps - 1)

    def _mask(
        self, before: torch.Tensor | None, parents: torch.Tensor, step: int
    ) -> torch.Tensor | None:
        """Which draft slots each branch sees, bool [B, K, K * S]: its ancestors' and its own."""
        topk, steps = self.spec.topk, self.spec.num_steps
        if topk == 1:
            return None
        slot = torch.arange(topk * steps, device=parents.device)
        own = (slot == slot[:topk, None] * steps + step).expand(len(parents), -1, -1)
        if before is None:
            return own
        return own | before.gather(1, parents[:, :, None].expand_as(own))


class DraftRunner(Runner[DraftOutput]):
    """Drafts the tree of every request from its first candidates.

    ``forward`` is one draft step: it gets ``DraftInputs`` with ``input_ids``, ``positions``,
    ``out_cache_loc`` and ``hidden_states`` of that step, a row per branch, and returns a
    ``ForwardOutput`` (or ``DraftExtendOutput``) with a row for each; hidden states may be left out
    by algorithms that need none. ``inputs.seq_lens`` stays the committed length at every step.
    Arguments as in ``Runner``.

    Raises:
        ConfigError: ``spec`` drafts nothing, or verifies more nodes than its steps can make.
    """

    mode = ForwardMode.DRAFT
    buffers_type = DraftInputBuffers
    output_type = DraftOutput
    step_type = DraftStep

    def __init__(self, forward: Any, *, spec: SpecConfig, **options: Any) -> None:
        steps, topk, width = spec.num_steps, spec.topk, spec.num_draft_tokens
        most = 1 + topk + (steps - 1) * topk * topk
        if steps < 1:
            raise ConfigError(
                "SpecConfig.num_steps is 0: there is nothing to draft. Use at least 1, or no "
                "DraftRunner.",
                field="num_steps",
            )
        if width > most:
            raise ConfigError(
                f"SpecConfig.num_draft_tokens is {width}, but {steps} steps of topk {topk} make at "
                f"most {most} nodes, the root included.",
                field="num_draft_tokens",
            )
        super().__init__(forward, spec=spec, **options)

    def steps_ahead(self) -> int:
        """Each of its forwards but the first moves every branch on by one."""
        return max(self.spec.num_steps - 2, 0)

    def fields_without_use(self) -> tuple[str, ...]:
        """A standalone draft model is not fed with hidden states."""
        return ("hidden_states",) if self.spec.resolved.is_standalone() else ()


def _per_branch(hidden_states: torch.Tensor | None, topk: int) -> torch.Tensor | None:
    """[B, H] to [B * K, H]."""
    if hidden_states is None or topk == 1:
        return hidden_states
    return hidden_states[:, None].expand(-1, topk, -1).flatten(0, 1)


def _of_parents(hidden_states: torch.Tensor | None, parents: torch.Tensor) -> torch.Tensor | None:
    """The row [B * K, H] that each branch continues."""
    requests, topk = parents.shape
    if hidden_states is None or topk == 1:
        return hidden_states
    first = torch.arange(requests, device=parents.device)[:, None] * topk
    return hidden_states.index_select(0, (first + parents).flatten())
