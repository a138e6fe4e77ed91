"""The draft head of EAGLE-3: features of three target layers and a reduced vocabulary.

Tensor suffixes: T tokens, H hidden, I input of attention (2 H), F features
(H or 3 H), V draft vocabulary.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from graphkit.errors import ConfigError
from graphkit.models.heads.eagle import check_one_layer
from graphkit.models.heads.layers import DraftHead, OwnLayer
from graphkit.models.heads.sources import HeadSources, join_inputs
from graphkit.models.quantization import Linear


class Eagle3Layer(OwnLayer):
    """A decoder layer whose attention reads the concatenation of embedding and feature.

    The caller applies ``input_layernorm`` and ``hidden_norm``.

    Args:
        layer: A decoder layer of transformers, whose modules this one takes over.
        hidden_norm: The norm of features.
        norm_before_residual: Whether the residual stream starts with the normalised feature.
    """

    def __init__(
        self, layer: nn.Module, hidden_norm: nn.Module, *, norm_before_residual: bool = False
    ) -> None:
        super().__init__(layer)
        self.hidden_norm = hidden_norm
        self.norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            plain: Any = self.self_attn.get_submodule(name)
            has_bias = plain.bias is not None
            wide = nn.Linear(2 * plain.in_features, plain.out_features, bias=has_bias)
            setattr(self.self_attn, name, wide)

    def forward(
        self,
        normed_1TI: Tensor,
        hidden_1TH: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Run the layer.

        Args:
            normed_1TI: Normalised embeddings and features side by side.
            hidden_1TH: The features, with which the residual stream starts.
            position_embeddings: Rotation of the rows, as transformers computes it.

        Returns:
            The residual stream. Its last sum may wait for a norm, see ``DraftHead.decode``.

        Shapes:
            normed_1TI: [1, T, 2 H].
            hidden_1TH, result: [1, T, H].
        """
        if self.norm_before_residual:
            hidden_1TH = normed_1TI[..., hidden_1TH.shape[-1] :]
        mixed_1TH, _ = self.self_attn(
            hidden_states=normed_1TI, attention_mask=None, position_embeddings=position_embeddings
        )
        hidden_1TH = hidden_1TH + mixed_1TH
        fed_1TH: Tensor = self.mlp(self.post_attention_layernorm(hidden_1TH))
        return hidden_1TH + fed_1TH


class Eagle3Head(DraftHead):
    """The head of EAGLE-3 (arXiv 2503.01840), in the layout of its published weights.

    Tokens are shifted as in ``EagleHead``. Rows of committed tokens read three residual streams of
    the target, side by side, which ``fc`` projects to H; draft steps read the head's own results.
    The head uses the target's embedding unless ``has_embedding``, and its output head unless
    ``has_head``. Nothing synchronises; shapes are static.

    Args:
        config: Sizes and options of the layer.
        target: The model that the head drafts for.
        aux_layers: Three target layers whose inputs the head reads. The number of layers selects
            the output of the last one; see ``AuxStates``. ``None`` selects those of published
            heads: 2, the middle, and the third to last.
        draft_vocab_size: Tokens that the head can draft, fewer than the target has. ``None``
            selects the target's vocabulary, without ``d2t``.
        fc_bias: Whether ``fc`` has a bias.
        has_embedding: Whether the head has its own embedding.
        has_head: Whether it has its own output head, which a reduced vocabulary needs.
        norm_before_residual: See ``Eagle3Layer``.

    Raises:
        ConfigError: The config has several layers, or does not match the target, or the target has
            none of ``aux_layers``.
    """

    d2t: Tensor | None

    def __init__(
        self,
        config: PreTrainedConfig,
        target: HeadSources,
        *,
        aux_layers: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        fc_bias: bool = False,
        has_embedding: bool = False,
        has_head: bool = True,
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__(config, target)
        check_one_layer(config)
        size, vocab_size = config.hidden_size, draft_vocab_size or config.vocab_size
        self.aux_layers = _checked(aux_layers, target.num_hidden_layers)
        if has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = Linear(3 * size, size, bias=fc_bias)
        self.midlayer = Eagle3Layer(
            self.new_layer(0), self.new_norm(), norm_before_residual=norm_before_residual
        )
        self.norm = self.new_norm()
        if has_head:
            self.lm_head: nn.Linear = Linear(size, vocab_size, bias=False)
        has_map = draft_vocab_size is not None
        self.register_buffer("d2t", torch.zeros(vocab_size, dtype=torch.int64) if has_map else None)
        # Not modules: assigning one would register it as a submodule.
        self._inputs = partial(
            join_inputs, self.embed_tokens if has_embedding else target.embedding
        )
        self._target_logits = None if has_head else target.logits

    def run_random(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DraftHead.run_random``."""
        ids_T, hidden_TF = self.random_rows(len(positions_T), 3 * self.config.hidden_size)
        out: tuple[Tensor, Tensor] = self(ids_T, hidden_TF, positions_T, with_logits=True)
        return out

    @property
    def tp_plan(self) -> Mapping[str, str]:
        """See ``DraftHead.tp_plan``."""
        plan = super().tp_plan.items()
        return {name.replace("layers.*.", "midlayer."): style for name, style in plan}

    @overload
    def forward(self, input_ids_T: Tensor, hidden_TF: Tensor, positions_T: Tensor) -> Tensor: ...

    @overload
    def forward(
        self,
        input_ids_T: Tensor,
        hidden_TF: Tensor,
        positions_T: Tensor,
        *,
        with_logits: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        input_ids_T: Tensor,
        hidden_TF: Tensor,
        positions_T: Tensor,
        *,
        with_logits: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the head over flat tokens.

        Args:
            input_ids_T: Token of the position after each row, in the target's vocabulary.
            hidden_TF: Three residual streams of the target, or the result of the previous draft
                step.
            positions_T: Position of each row in its request.
            with_logits: Whether to return the logits of all rows, too.

        Returns:
            The hidden states, before the final norm; with ``with_logits``, the logits and the
            hidden states.

        Shapes:
            input_ids_T, positions_T: [T] int32 or int64.
            hidden_TF: [T, 3 H] or [T, H].
            hidden states: [T, H]. logits: [T, V].
        """
        hidden_TH = self.fc(hidden_TF) if hidden_TF.shape[1] == self.fc.in_features else hidden_TF
        norms = self.midlayer.input_layernorm, self.midlayer.hidden_norm
        eps = self.config.rms_norm_eps
        normed_1TI = self._inputs(input_ids_T, hidden_TH, norms, eps)[None]
        rotation = self.rotary_emb(normed_1TI, positions_T[None])
        out_1TH = self.midlayer(normed_1TI, hidden_TH[None], rotation)
        normed_TH = self.norm(out_1TH)[0]  # first, since it computes the last sum
        out_TH: Tensor = out_1TH[0]
        return (self._logits_of(normed_TH), out_TH) if with_logits else out_TH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply the final norm and the output head: [T, H] to [T, V]."""
        return self._logits_of(self.norm(hidden_TH))

    def _logits_of(self, normed_TH: Tensor) -> Tensor:
        if self._target_logits is not None:
            return self._target_logits(normed_TH)
        logits_TV: Tensor = self.lm_head(normed_TH)
        return logits_TV

    def token_map(self) -> Tensor | None:
        """Return the target token of each draft token, int64 [V]; ``None`` if they are the same.

        A new tensor, for ``EngineModel.draft_token_map``; ``d2t`` has the differences.
        """
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def _checked(layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    given = (2, num_layers // 2, num_layers - 3) if layers is None else tuple(layers)
    if len(given) != 3 or not all(0 <= layer <= num_layers for layer in given):
        raise ConfigError(
            f"the EAGLE-3 head reads the inputs of target layers {', '.join(map(str, given))}, but "
            f"the target has layers 0 to {num_layers}, the last of which is the output. Use the "
            "target that the head was trained for, or name three of its layers in "
            "eagle_aux_hidden_state_layer_ids.",
            field="aux_layers",
        )
    return given
