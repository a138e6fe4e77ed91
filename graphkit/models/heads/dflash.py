"""The draft model of DFLASH: it fills a block of mask tokens in one forward (arXiv 2602.06036).

Tensor suffixes: T rows, H hidden, F features (n H for n target layers), V vocabulary, M key and
value heads, D head dim.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from graphkit.buffers import DraftContextInputs, TargetVerifyInputs
from graphkit.config import require_int
from graphkit.engine import DFlashDrafter, Drafter, EngineModel
from graphkit.errors import ConfigError
from graphkit.models.fusion.linears import project_merged
from graphkit.models.heads.config import head_dim
from graphkit.models.heads.dflash_parts import (
    BlockOptions,
    CandidateSelector,
    DFlash2Layer,
    MarkovHead,
)
from graphkit.models.heads.layers import DraftHead, HeadSources
from graphkit.models.pools import LayerGroupAttention
from graphkit.models.quantization.linear import Linear
from graphkit.models.running import SelectedKeys
from graphkit.ops.heads import ProjectedHeads
from graphkit.runners import DraftContextOutput, ForwardOutput
from graphkit.spec import SpecConfig


class DFlashHead(DraftHead):
    """The head of DFLASH, with the parameter names of ``muse_glimmer_assistant`` of transformers.

    Each layer attends to two kinds of keys and values: those of the context, which it projects from
    the target's hidden states of committed tokens, and those of the block itself. A block is the
    bonus token and mask tokens; the row of a mask token predicts the token of its position. All
    rows of a block see each other.

    Its blocks run in engines and in STEP alone.

    Args:
        config: Sizes and options of the layers.
        target: The model that the head drafts for.
        target_layer_ids: Target layers whose outputs are the context, from 0; -1 is its embedding.
        block_size: Rows of a block, the bonus token included.
        mask_token_id: Token of the target's vocabulary that stands for tokens to predict.
        options: How its blocks differ from those of DFLASH; ``None`` for those.
        **own: ``has_embedding`` and ``has_head`` of ``DraftHead``.

    Raises:
        ConfigError: The config does not match the target, or the target has no such layer or token.
    """

    algorithm = "DFLASH"
    modes = ()  # in a target, TARGET_VERIFY is the mode of the target's own forward

    def __init__(
        self,
        config: PreTrainedConfig,
        target: HeadSources,
        *,
        target_layer_ids: Sequence[int],
        block_size: int,
        mask_token_id: int,
        options: BlockOptions | None = None,
        **own: bool,
    ) -> None:
        super().__init__(config, target, **own)
        self.options = options = options or BlockOptions()
        require_int("DFlashHead", "block_size", block_size, least=2 - options.sample_from_anchor)
        options.check(config.hidden_size, config.vocab_size)
        self.target_layer_ids = _checked(target_layer_ids, target.num_hidden_layers)
        self.aux_layers = tuple(layer + 1 for layer in self.target_layer_ids)
        self.block_size, self.mask_token_id = block_size, _token(mask_token_id, config)
        size = config.hidden_size
        # Projects the outputs of the target's layers side by side, [T, F], to a row per token.
        project = Linear(len(self.target_layer_ids) * size, size, bias=False)
        self.encoder = nn.Sequential(OrderedDict(fc=project, output_norm_enc=self.new_norm()))
        self.layers = nn.ModuleList(map(self.new_layer, range(config.num_hidden_layers)))
        self.norm = self.new_norm()
        if options.conv_kernel_size:
            self.layers = nn.ModuleList(DFlash2Layer(layer, size, options) for layer in self.layers)
        tokens, rank = config.vocab_size, options.markov_rank
        kind, best = options.markov_head_type, options.selector_top_k
        self.markov_head = MarkovHead(tokens, rank, kind, size) if rank else None
        rank = options.selector_rank
        self.candidate_selector = CandidateSelector(tokens, rank, best, size) if rank else None

    def context_heads(self, context_TH: Tensor, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of committed tokens, for each layer.

        Args:
            context_TH: What ``encoder`` returns for the target's hidden states of
                ``target_layer_ids``, side by side.
            positions_T: Position of each token in its request.

        Shapes:
            context_TH: [T, H]. positions_T: [T] int32 or int64. results: [T, M, D] each.
        """
        frequencies = self.rotary_emb.get_buffer("inv_freq")
        kept = []
        for layer in self.layers:
            attention = layer.get_submodule("self_attn")
            rows = self._keys_and_values(attention, context_TH)
            norm = getattr(attention, "k_norm", None)  # of Qwen3
            heads = ProjectedHeads(
                rows, positions_T, frequencies, 0, rows.shape[-1] // (2 * head_dim(self.config)),
                None, None if norm is None else norm.weight, self.config.rms_norm_eps,
            )  # fmt: skip
            _, key_TMD, value_TMD = heads.rotated()
            kept.append((key_TMD, value_TMD))
        return kept

    def _keys_and_values(self, attention: nn.Module, context_TH: Tensor) -> Tensor:
        """Return projected keys and values side by side, [T, 2 M D]."""
        projections = [attention.get_submodule(name) for name in ("k_proj", "v_proj")]
        if torch.is_grad_enabled():  # joint products have no gradients of their weights
            return torch.cat([projection(context_TH) for projection in projections], -1)
        return project_merged(projections, context_TH)

    def run_random(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DraftHead.run_random``."""
        size = len(self.target_layer_ids) * self.config.hidden_size
        ids_T, features_TF = self.random_rows(len(positions_T), size)
        return self.encoder(features_TF), self(ids_T, positions_T)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, width: int | None = None) -> Tensor:
        """Run the head over the rows of blocks.

        Args:
            input_ids_T: Bonus and mask tokens.
            positions_T: Position of each row in its request.
            width: Rows of a block; ``None`` for one block.

        Shapes:
            input_ids_T, positions_T: [T] int32 or int64.
            result: [T, H], after the final norm.
        """
        rows_TH = self._embed(input_ids_T)
        options = {"width": width or len(rows_TH)} if self.options.conv_kernel_size else {}
        hidden_1TH = self.decode(self.layers, rows_TH, positions_T, **options)
        normed_TH: Tensor = self.norm(hidden_1TH)[0]
        return normed_TH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply the output head: [T, H] to [T, V]."""
        logits_TV, bound = super().logits(hidden_TH), self.options.final_logit_softcapping
        if self.options.output_multiplier != 1:
            logits_TV = logits_TV * self.options.output_multiplier
        return (logits_TV / bound).tanh() * bound if bound else logits_TV

    def drafted_logits(
        self, hidden_TH: Tensor, input_ids_T: Tensor, width: int, drafts: int
    ) -> Tensor:
        """Return logits of blocks of which the best token of each row is its draft, [T, V].

        Args:
            hidden_TH: What the head returned.
            input_ids_T: Bonus and mask tokens.
            width: Rows of a block.
            drafts: Drafts of a block. The logits of further rows do not depend on drafts.
        """
        logits_TV, choose = self.logits(hidden_TH), self.markov_head or self.candidate_selector
        if choose is None:
            return logits_TV
        logits_BWV, hidden_BWH = (rows.unflatten(0, (-1, width)) for rows in (logits_TV, hidden_TH))
        previous_B, state, rows = input_ids_T.view(-1, width)[:, 0], None, [*logits_BWV.unbind(1)]
        first = 0 if self.options.sample_from_anchor else 1
        for row in range(first, min(first + drafts, width)):
            rows[row], state = choose(rows[row], hidden_BWH[:, row], previous_B, state)
            previous_B = rows[row].argmax(-1)
        return torch.stack(rows, 1).flatten(0, 1)

    def drafter(self, model: EngineModel) -> Drafter:
        """See ``DraftModel.drafter``."""
        return DFlashDrafter(
            model,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            sample_from_anchor=self.options.sample_from_anchor,
        )

    def _forward(self, attention: LayerGroupAttention, spec: SpecConfig) -> Any:
        return partial(self._run_block, spec.longest.num_draft_tokens - 1, attention)

    def _run_block(
        self,
        drafts: int,
        attention: LayerGroupAttention,
        inputs: TargetVerifyInputs | DraftContextInputs,
    ) -> ForwardOutput | DraftContextOutput:
        """Return logits of every row of a block, or store the keys and values of a context."""
        if isinstance(inputs, DraftContextInputs):
            context = self.encoder(inputs.hidden_states)
            for layer, (key, value) in enumerate(self.context_heads(context, inputs.positions)):
                attention.store(layer, key, value, inputs.out_cache_loc)
            return DraftContextOutput(hidden_states=context)
        width = inputs.tokens_per_request
        with self._over_pools(attention, inputs, self._windows(inputs, width)):
            hidden = self(inputs.input_ids, inputs.positions, width)
        logits = self.drafted_logits(hidden, inputs.input_ids, width, drafts)
        return ForwardOutput(next_token_logits=logits)

    def _windows(self, inputs: TargetVerifyInputs, width: int) -> Mapping[int, SelectedKeys]:
        """Return the keys that rows of a block see in layers with a window, by layer.

        Those of its request from the window of the row on: up to the end of the block, or up to the
        row itself in causal layers.
        """
        options, metadata = self.options, inputs.attention
        assert metadata is not None, "a runner sets it"
        most = options.window + (0 if options.is_causal else width - 1)
        if not options.windowed_layers or (
            not options.is_causal and metadata.max_seqlen_k <= options.window
        ):
            return {}
        rows = inputs.positions
        ends = rows + 1 if options.is_causal else (inputs.seq_lens + width).repeat_interleave(width)
        keys = torch.arange(min(most, metadata.max_seqlen_k), device=rows.device)
        keys = (rows - options.window + 1).clamp(min=0)[:, None] + keys
        selected = SelectedKeys(keys.masked_fill(keys >= ends[:, None], -1))
        return dict.fromkeys(options.windowed_layers, selected)


def _checked(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    # Engines differ in whether the output of the last layer is taken before the final norm.
    if not layers or not all(-1 <= layer < num_layers - 1 for layer in layers):
        raise ConfigError(
            f"the DFLASH head reads the outputs of target layers {', '.join(map(str, layers))}, "
            f"expected at least one of layers 0 to {num_layers - 2}, all but the target's last, or "
            "-1, its embedding. Use the target that the head was trained for.",
            field="target_layer_ids",
        )
    return tuple(layers)


def _token(token: int, config: PreTrainedConfig) -> int:
    if not 0 <= token < config.vocab_size:
        raise ConfigError(
            f"mask_token_id is {token}, but the target has tokens 0 to {config.vocab_size - 1}. "
            "Use the target that the head was trained for.",
            field="mask_token_id",
        )
    return token
