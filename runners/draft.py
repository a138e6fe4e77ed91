"""DRAFT: the draft model proposes a tree, all its steps unrolled in one graph.

Suffixes: B requests, K branches.
"""

# ruff: noqa: N803 - suffixes of tensor names are dimensions

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from graphkit.buffers import DraftInputs
from graphkit.errors import ConfigError
from graphkit.ops.logits import argmax_rows, top_candidates
from graphkit.ops.rows import gather_rows
from graphkit.ops.step_rows import draft_step_rows
from graphkit.ops.tree import chain_candidates
from graphkit.ops.tree_growth import choose_nodes, grow_tree, plant_tree
from graphkit.runners.mode_declaration import SampleRows
from graphkit.runners.outputs import DraftOutput
from graphkit.runners.runner import Runner
from graphkit.runners.step import Step
from graphkit.spec import ForwardMode, SpecConfig


class TreeGrowth:
    """The candidates of every request, step by step. Static shapes; may be captured.

    Args:
        topk_p_BK: Probabilities of the candidates of step 0.
        topk_index_BK: Their token ids.
        num_steps: Draft steps (S); the tree is complete after S - 1 calls of ``grow``.

    Shapes:
        topk_p_BK: [B, K] float32. topk_index_BK: [B, K] int64.

    Attributes:
        tokens: [B, K] int64, tokens of the current branches.
        parents: [B, K] int64, branch of the previous step that each current branch continues; set
            by ``grow``.
        rows: [B * K] int64, row of each current branch in the hidden states of the previous step;
            at step 0 in the hidden states of the requests.
        mask: [B, K, K * S] bool, the draft slots that each current branch sees.
    """

    def __init__(
        self, topk_p_BK: torch.Tensor, topk_index_BK: torch.Tensor, num_steps: int
    ) -> None:
        self._scores, self._tokens, self._parent_list, self.rows, self.mask = plant_tree(
            topk_p_BK, topk_index_BK, num_steps
        )
        self._branch_scores, self.tokens = topk_p_BK, topk_index_BK
        self._step = 0

    def grow(self, topk_p: torch.Tensor, topk_index: torch.Tensor) -> None:
        """Add the candidates after each current branch, and continue with the K best of them.

        Shapes:
            topk_p: [B * K, K] float32. topk_index: [B * K, K] int64.
        """
        self._step += 1
        self._branch_scores, self.tokens, self.parents, self.rows, self.mask = grow_tree(
            self._scores, self._tokens, self._parent_list, self._branch_scores, topk_p,
            topk_index, self.mask, self._step,
        )  # fmt: skip

    def best(self, num_draft_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the ``num_draft_tokens - 1`` best candidates of all steps, which join the root.

        Returns:
            parent_list: [B, K * (S - 1) + 1] int64, the candidate that each branch continues; -1
                is the root.
            top_scores_index: [B, W - 1] int64, ascending numbers of the selected candidates.
            draft_tokens: [B, W - 1] int64, their token ids.
        """
        chosen, tokens = choose_nodes(self._scores, self._tokens, num_draft_tokens)
        return self._parent_list, chosen, tokens


class DraftStep(Step[DraftOutput]):
    """Grows a tree in S steps with S - 1 forwards: the batch brings the candidates of the first.

    Attributes:
        choose: Returns the candidates after rows of logits, from these, the request rows and the
            position of each row: probabilities [N, K], which chains do not read, and tokens [N, K].
            ``None`` selects the most probable tokens.
    """

    choose: Callable[..., tuple[torch.Tensor | None, torch.Tensor]] | None = None

    def whole(self, inputs: DraftInputs) -> DraftOutput:
        """Grow the tree and choose its nodes. The inputs are not changed."""
        grow = self._chain if self.spec.topk == 1 else self._tree
        parent_list, top_scores_index, draft_tokens = grow(inputs)
        return DraftOutput(
            parent_list=parent_list, top_scores_index=top_scores_index, draft_tokens=draft_tokens
        )

    def _chain(self, inputs: DraftInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Follow the most probable token of each step. Probabilities decide nothing here."""
        tokens = inputs.topk_index.new_empty(self.spec.num_steps - 1, inputs.batch_size)
        input_ids, hidden_states = inputs.topk_index.flatten(), inputs.hidden_states
        for view, lengths, best in zip(*self._steps(inputs), tokens, strict=True):
            view.input_ids, view.hidden_states = input_ids, hidden_states
            logits, hidden_states = self._run(view, lengths)
            if self.choose is None:
                argmax_rows(best, logits, None, self.draft_token_map)
            else:
                best.copy_(self.choose(logits, view.req_pool_indices, view.positions)[1][:, 0])
            input_ids = best
        return chain_candidates(inputs.topk_index, tokens, self.spec.num_draft_tokens)

    def _tree(self, inputs: DraftInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Continue the K best branches of each step."""
        tree = TreeGrowth(inputs.topk_p, inputs.topk_index, self.spec.num_steps)
        hidden_states = inputs.hidden_states
        for view, lengths in zip(*self._steps(inputs), strict=True):
            view.input_ids, view.custom_mask = tree.tokens.flatten(), tree.mask
            view.hidden_states = hidden_states
            if hidden_states is not None:
                view.hidden_states = gather_rows(hidden_states, tree.rows)
            logits, hidden_states = self._run(view, lengths)
            if self.choose is None:
                topk = self.spec.topk
                probs, tokens = top_candidates(logits, topk, token_map=self.draft_token_map)
            else:
                chosen, tokens = self.choose(logits, view.req_pool_indices, view.positions)
                assert chosen is not None, "candidates of a tree have probabilities"
                probs = chosen
            tree.grow(probs, tokens)
        return tree.best(self.spec.num_draft_tokens)

    def _steps(self, inputs: DraftInputs) -> tuple[list[DraftInputs], torch.Tensor]:
        """Return each forward's inputs, one row per branch, and lengths for its metadata."""
        positions, slots, lengths = draft_step_rows(
            inputs.positions, inputs.out_cache_loc, inputs.seq_lens, self.spec.topk,
            self.spec.num_steps,
        )  # fmt: skip
        mrope = inputs.mrope_positions
        views = [
            replace(
                inputs,
                positions=positions[step],
                out_cache_loc=slots[step],
                mrope_positions=None if mrope is None else mrope + step,
            )
            for step in range(len(positions))
        ]
        return views, lengths

    def _run(
        self, view: DraftInputs, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one step's forward, and return its logits and hidden states."""
        self.attend(view, replace(view, seq_lens=lengths))
        return self.draft_rows(self.forward(view), {"token": view.num_tokens})


class DraftRunner(Runner[DraftInputs, DraftOutput]):
    """Drafts the tree of every request from its first candidates.

    ``forward`` is one draft step. It takes ``DraftInputs`` with ``input_ids``, ``positions``,
    ``out_cache_loc`` and ``hidden_states`` of that step, one row per branch. It returns a
    ``ForwardOutput`` or ``DraftExtendOutput`` with one row per branch. Algorithms without hidden
    states may omit them. ``inputs.seq_lens`` is the committed length at every step. Batch and
    output have target tokens, also with a ``draft_token_map``. See ``Runner`` for the arguments.

    Raises:
        ConfigError: ``spec`` drafts nothing, or verifies more nodes than its steps create.
    """

    mode = ForwardMode.DRAFT
    inputs_type = DraftInputs
    output_type = DraftOutput
    step_type = DraftStep

    def _check_spec(self, spec: SpecConfig) -> None:
        if spec.num_steps < 1:
            raise ConfigError(
                "SpecConfig.num_steps is 0: DraftRunner needs at least 1 draft step.",
                field="num_steps",
            )
        spec.check_draft_steps()

    @classmethod
    def slots_written(cls, spec: SpecConfig) -> int:
        """Return K * S: each branch has S consecutive slots."""
        return spec.topk * spec.num_steps

    @classmethod
    def sample_fields(cls, spec: SpecConfig, rows: SampleRows) -> dict[str, Any]:
        """See ``Runner.sample_fields``. All branches begin at the same position."""
        positions = rows.committed.repeat(spec.topk)
        return super().sample_fields(spec, rows) | {
            "positions": positions,
            "mrope_positions": np.tile(positions, (3, 1)),
            "out_cache_loc": rows.slots_after(cls.slots_written(spec)).ravel(),
        }

    def steps_ahead(self) -> int:
        """Return S - 2: each forward but the first advances every branch by one position."""
        return max(self.spec.num_steps - 2, 0)

    def unused_fields(self) -> tuple[str, ...]:
        """Return the hidden states if the draft model is standalone."""
        return ("hidden_states",) if self.spec.resolved.is_standalone() else ()
