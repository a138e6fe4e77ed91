"""The draft heads of EAGLE and EAGLE-3: one decoder layer over hidden states of the target.

Row p of a request takes the target's feature at position p and the token of position p + 1; its
logits predict the token of position p + 2. Further draft steps feed the head's own hidden states
back as features.

Tensor suffixes: T tokens, H hidden, I input of attention (2 H), F features (H or 3 H), V vocabulary
of the drafts.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from graphkit.errors import ConfigError
from graphkit.models.heads.layers import DraftHead, HeadSources, OwnLayer
from graphkit.models.quantization.linear import Linear


class EagleHead(DraftHead):
    """The head of EAGLE and EAGLE-2, in the layout of its published weights.

    Its features are the target's hidden states after the final norm. Layer 0 has no input norm and
    there is no final one (arXiv 2401.15077, section 3.1).

    Args:
        config: Sizes and options of the layer.
        target: The model that the head drafts for.
        fc_bias: Whether ``fc`` has a bias.
        **own: ``has_embedding`` and ``has_head`` of ``DraftHead``.

    Raises:
        ConfigError: The config has several layers, or does not match the target.
    """

    algorithm = "EAGLE"

    def __init__(
        self, config: PreTrainedConfig, target: HeadSources, *, fc_bias: bool = False, **own: bool
    ) -> None:
        super().__init__(config, target, **own)
        _check_one_layer(config)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        layer = self.new_layer(0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])

    def run_random(self, positions_T: Tensor) -> Tensor:
        """See ``DraftHead.run_random``."""
        ids_T, hidden_TH = self.random_rows(len(positions_T), self.config.hidden_size)
        out_TH: Tensor = self(ids_T, hidden_TH, positions_T)
        return out_TH

    def forward(self, input_ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor) -> Tensor:
        """Run the head over flat tokens.

        Args:
            input_ids_T: Token of the position after each row.
            hidden_TH: The target's features, or the result of the previous draft step.
            positions_T: Position of each row in its request.

        Shapes:
            input_ids_T, positions_T: [T] int32 or int64.
            hidden_TH, result: [T, H].
        """
        merged_TH = self.fc(self._inputs(input_ids_T, hidden_TH))
        return self.decode(self.layers, merged_TH, positions_T)[0]


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

    Rows of committed tokens read three residual streams of the target, side by side, which ``fc``
    projects to H; draft steps read the head's own results.

    Args:
        config: Sizes and options of the layer.
        target: The model that the head drafts for.
        aux_layers: Three target layers whose inputs the head reads. The number of layers selects
            the output of the last one. ``None`` selects those of published heads: 2, the middle,
            and the third to last.
        draft_vocab_size: Tokens that the head can draft, fewer than the target has. ``None``
            selects the target's vocabulary, without ``d2t``.
        fc_bias: Whether ``fc`` has a bias.
        norm_before_residual: See ``Eagle3Layer``.
        has_head: See ``DraftHead``; a reduced vocabulary needs its own.
        **own: ``has_embedding`` of ``DraftHead``.

    Raises:
        ConfigError: The config has several layers, or does not match the target, or the target has
            none of ``aux_layers``.
    """

    algorithm = "EAGLE3"
    d2t: Tensor | None

    def __init__(
        self,
        config: PreTrainedConfig,
        target: HeadSources,
        *,
        aux_layers: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        fc_bias: bool = False,
        norm_before_residual: bool = False,
        has_head: bool = True,
        **own: bool,
    ) -> None:
        super().__init__(config, target, has_head=has_head, vocab_size=draft_vocab_size, **own)
        _check_one_layer(config)
        size = config.hidden_size
        self.aux_layers = _checked(aux_layers, target.num_hidden_layers)
        self.fc = Linear(3 * size, size, bias=fc_bias)
        self.midlayer = Eagle3Layer(
            self.new_layer(0), self.new_norm(), norm_before_residual=norm_before_residual
        )
        self.norm = self.new_norm()
        no_shift = None if draft_vocab_size is None else torch.zeros(draft_vocab_size).long()
        self.register_buffer("d2t", no_shift)

    @property
    def token_map(self) -> Tensor | None:
        """See ``DraftModel.token_map``; ``d2t`` has the differences."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def tp_plan(self) -> Mapping[str, str]:
        """See ``DraftHead.tp_plan``."""
        plan = super().tp_plan.items()
        return {name.replace("layers.*.", "midlayer."): style for name, style in plan}

    def run_random(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DraftHead.run_random``."""
        ids_T, hidden_TF = self.random_rows(len(positions_T), 3 * self.config.hidden_size)
        return self.predict(ids_T, hidden_TF, positions_T)

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
            with_logits: Whether to return the logits of all rows, too. The final norm, which
                computes the last sum, then runs once.

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
        return (super().logits(normed_TH), out_TH) if with_logits else out_TH

    def predict(self, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DraftHead.predict``; the arguments are those of ``forward``."""
        # By a call of the head, whose operations are then recorded as those of its module.
        out: tuple[Tensor, Tensor] = self(*rows, with_logits=True)
        return out

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply the final norm and the output head: [T, H] to [T, V]."""
        return super().logits(self.norm(hidden_TH))


def _check_one_layer(config: PreTrainedConfig) -> None:
    if config.num_hidden_layers != 1:
        raise ConfigError(
            f"an EAGLE head must have num_hidden_layers 1, got {config.num_hidden_layers}. Use a "
            "head of one layer, and its config.json, not that of the target.",
            field="num_hidden_layers",
        )


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
