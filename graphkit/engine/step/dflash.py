"""Drafting with a block-diffusion draft model: DFLASH (arXiv 2602.06036).

The draft model attends to the committed tokens through keys and values that it projects from the
target's hidden states. One forward over the bonus token and mask tokens predicts all drafts.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch

from graphkit.buffers import DraftContextInputs, TargetVerifyInputs
from graphkit.config import require_int
from graphkit.engine.step.acceptance import Verified
from graphkit.engine.step.context import EngineContext
from graphkit.engine.step.draft_tree import ChainTree, DraftTree
from graphkit.engine.step.drafter import Drafter, check_draft_width, require_hidden_states
from graphkit.engine.step.engine_model import EngineModel
from graphkit.engine.step.prefill_batch import PrefillChunk
from graphkit.errors import ConfigError
from graphkit.ops.logits import argmax_rows
from graphkit.ops.step_rows import extend_rows, verify_rows
from graphkit.runners import DraftContextOutput, StepRunner, TargetVerifyRunner
from graphkit.spec import ForwardMode, SpecConfig


class DFlashDrafter(Drafter):
    """Drafts a chain in one forward of a draft model over a block of mask tokens.

    A ``TargetVerifyRunner`` in draft-worker mode runs the blocks. Its width is the block size,
    which may be larger than the target's: only the first ``num_draft_tokens - 1`` predictions are
    drafts. A ``StepRunner`` stores the keys and values of tokens that the target has processed.

    A block starts behind the committed tokens, at the slots that the target verifies next. It
    overwrites the keys and values of rejected drafts, and is itself overwritten when the drafter
    catches up on the accepted tokens.

    Args:
        model: The draft model. Its forward receives ``TargetVerifyInputs`` whose ``input_ids`` are
            blocks, ``custom_mask`` all true, and returns a ``ForwardOutput``, whose logits at a
            row predict the token of that row. It also receives ``DraftContextInputs``: it
            then stores their keys and values at ``out_cache_loc`` and returns a
            ``DraftContextOutput``.
        block_size: Rows of a block, the bonus token included.
        mask_token_id: Token of all rows but the first.
        sample_from_anchor: Whether logits at a row predict the token behind it, as in DSPARK, so
            that a block has a draft more.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        model: EngineModel,
        *,
        block_size: int,
        mask_token_id: int,
        sample_from_anchor: bool = False,
    ) -> None:
        require_int("DFlashDrafter", "block_size", block_size, least=2 - sample_from_anchor)
        require_int("DFlashDrafter", "mask_token_id", mask_token_id, least=0)
        self._model, self._block_size, self._mask_token = model, block_size, mask_token_id
        self._shift = int(sample_from_anchor)

    def prepare(self, context: EngineContext) -> None:
        """See ``Drafter.prepare``."""
        if context.spec.topk > 1:
            raise ConfigError(
                f"SpecConfig.topk is {context.spec.topk}, but DFlashDrafter drafts chains. Set "
                "topk to 1.",
                field="topk",
            )
        if self._mask_token >= context.sizes.vocab_size:
            raise ConfigError(
                f"mask_token_id is {self._mask_token}, but the target has tokens 0 to "
                f"{context.sizes.vocab_size - 1}. Use the target of the draft model.",
                field="mask_token_id",
            )
        context.check(self._model)
        spec = self._block_spec(context)
        self._width = width = spec.tokens_per_request(ForwardMode.TARGET_VERIFY)
        device, requests = context.device, context.sizes.max_batch_size
        self._block: TargetVerifyRunner = TargetVerifyRunner(
            self._model.forward,
            spec=spec,
            attention=self._model.attention,
            draft_token_map=self._model.draft_token_map,
            # Every row sees its whole block, in every batch.
            bound_fields={
                "custom_mask": torch.ones(requests, width, width, dtype=torch.bool, device=device)
            },
            **context.runner_options,
            sizes=context.sizes,
        )
        masks = torch.full((requests * width,), self._mask_token, dtype=torch.int64)
        self._masks = masks.to(device)
        self._set_length(context)
        self.runners = (self._block, self._catch_up)

    def at_length(self, context: EngineContext) -> DFlashDrafter:
        """See ``Drafter.at_length``. A length verifies the first drafts of the blocks."""
        other = copy(self)
        other._set_length(context)
        other.runners = (other._catch_up,)
        return other

    def _block_spec(self, context: EngineContext) -> SpecConfig:
        """Return the settings of the runners of the draft model."""
        return replace(context.spec, is_draft_worker=True, num_draft_tokens=self._block_size)

    def _set_length(self, context: EngineContext) -> None:
        """Create what depends on the draft length."""
        check_draft_width(type(self).__name__, context)
        self._context, self._drafted = context, context.spec.num_draft_tokens
        width, most = self._width, self._width + self._shift
        if not 2 <= self._drafted <= most:
            raise ConfigError(
                f"SpecConfig.num_draft_tokens is {self._drafted}, but a block of DFlashDrafter has "
                f"{width} rows, the bonus token included. Set num_draft_tokens to a value from 2 "
                f"to {most}.",
                field="num_draft_tokens",
            )
        self._catch_up: StepRunner[DraftContextInputs, DraftContextOutput] = StepRunner(
            self._model.forward,
            inputs=DraftContextInputs,
            output=DraftContextOutput,
            spec=self._block_spec(context),
            tokens_per_request=context.verify_width,
            mutable_state={
                f"kv_pools[{i}].{name}": buffer
                for i, pool in enumerate(self._model.kv_pools)
                for name, buffer in pool.tensors().items()
            },
            **context.runner_options,
            sizes=context.sizes,
        )
        starts = torch.arange(context.sizes.max_batch_size)[:, None] * width
        # The token at the root of a tree is not read, whatever its row predicts.
        rows = (torch.arange(self._drafted) - self._shift).clamp(min=0)
        self._drafted_rows = (starts + rows).flatten().to(context.device)
        self._chain = ChainTree.one_chain(context, self._drafted)

    @property
    def max_path(self) -> int:
        """See ``Drafter.max_path``."""
        return self._drafted

    @property
    def slots_needed(self) -> int:
        """The rows of a block."""
        return self._width

    def prefill(self, chunk: PrefillChunk) -> None:
        """See ``Drafter.prefill``."""
        positions = torch.arange(len(chunk.input_ids), device=self._context.device)
        self._catch_up.fall_back(
            DraftContextInputs(
                req_pool_indices=chunk.req_pool_indices,
                positions=chunk.start + positions,
                out_cache_loc=chunk.out_cache_loc,
                hidden_states=require_hidden_states(type(self).__name__, chunk.hidden_states),
            )
        )

    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> DraftTree:
        """See ``Drafter.draft``."""
        requests, width = len(seq_lens), self._width
        tokens, positions, slots = verify_rows(
            req_pool_indices, self._context.req_to_token, seq_lens, bonus_tokens,
            self._masks[: requests * width], None, width, self._context.sizes.vocab_size,
        )  # fmt: skip
        out = self._block.run(
            TargetVerifyInputs(
                req_pool_indices=req_pool_indices,
                seq_lens=seq_lens,
                input_ids=tokens,
                positions=positions,
                out_cache_loc=slots,
            )
        )
        rows = self._drafted_rows[: requests * self._drafted]
        drafted = torch.empty_like(rows)
        argmax_rows(drafted, out.next_token_logits, rows, self._model.draft_token_map)
        return self._chain.of(drafted.view(requests, -1))

    def extend(self, verified: Verified) -> None:
        """See ``Drafter.extend``."""
        _, _, positions, _ = extend_rows(
            verified.seq_lens, verified.counts.num_accepted_drafts, self._context.verify_width
        )
        self._catch_up.run(
            DraftContextInputs(
                req_pool_indices=verified.req_pool_indices,
                positions=positions,
                out_cache_loc=verified.out_cache_loc,
                hidden_states=require_hidden_states(type(self).__name__, verified.hidden_states),
            )
        )
