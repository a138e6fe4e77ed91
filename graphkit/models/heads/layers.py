"""What draft heads are: decoder layers of transformers over graphkit's pools.

Tensor suffixes: T tokens, H hidden, V vocabulary.
"""
# ruff: noqa: N803, N806 -- the suffixes are shapes

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

from graphkit.distributed import RankGroup
from graphkit.errors import ConfigError
from graphkit.models.forward import IMPLEMENTATION
from graphkit.models.fusion import fuse_modules
from graphkit.models.fusion.observation import ROWS, observe
from graphkit.models.heads.config import check_layers
from graphkit.models.heads.draft_model import DraftModel, is_packed, last_rows
from graphkit.models.layout import AttentionLayer, ModelLayout
from graphkit.models.pools import LayerGroupAttention
from graphkit.models.quantization.linear import Linear
from graphkit.ops.decoder import embed_and_join
from graphkit.runners import ForwardOutput
from graphkit.spec import SpecConfig

_GATHERED = ("fc", "lm_head")
"""Names of the projections whose outputs ranks split and gather."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadSources:
    """What a draft head uses of its target. It holds no weights of its own.

    Attributes:
        embedding: Maps token ids to rows, [T] to [T, H].
        lm_head: Maps hidden states to logits; its ``weight`` has the dtype and the device of the
            target, and this rank's rows if ranks split it.
        num_hidden_layers: Decoder layers of the target.
        group: Ranks that split the target, and its draft heads with it; ``None`` on one device.
    """

    embedding: nn.Module
    lm_head: nn.Linear
    num_hidden_layers: int
    group: RankGroup | None = None

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.lm_head.in_features

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self.lm_head.out_features


def check_fit(config: PreTrainedConfig, target: HeadSources) -> None:
    """Check that a draft head has the hidden size and vocabulary of its target.

    Raises:
        ConfigError: One of them differs.
    """
    for field in ("hidden_size", "vocab_size"):
        value, expected = getattr(config, field), getattr(target, field)
        if value != expected:
            raise ConfigError(
                f"the draft head has {field} {value}, but its target has {expected}. Use the "
                "target that the head was trained for.",
                field=field,
            )


def join_inputs(
    embedding: nn.Module,
    input_ids_T: Tensor,
    hidden_TH: Tensor,
    norms: tuple[nn.Module, nn.Module] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Embed tokens and put features beside them.

    One op does both, and the norms, where the embedding is a table in the dtype of the features and
    no gradient is recorded. Otherwise the modules run, so that a gradient needs no second forward.

    Args:
        embedding: Maps token ids to rows; of the head, or of its target.
        input_ids_T: Token of each row.
        hidden_TH: Feature of each row.
        norms: Root mean square norms of embeddings and of features; ``None`` for none.
        eps: Added to the mean squares by both norms.

    Shapes:
        input_ids_T: [T] int32 or int64. hidden_TH: [T, H]. result: [T, 2 H].
    """
    table = _table(embedding)
    if table is None or table.dtype != hidden_TH.dtype or torch.is_grad_enabled():
        embedded_TH = embedding.forward(input_ids_T)
        if norms is not None:
            embedded_TH, hidden_TH = norms[0](embedded_TH), norms[1](hidden_TH)
        return torch.cat((embedded_TH, hidden_TH), dim=-1)
    if norms is None:
        return embed_and_join(input_ids_T, table, hidden_TH)
    first, second = (norm.get_parameter("weight") for norm in norms)
    return embed_and_join(input_ids_T, table, hidden_TH, first, second, eps)


def _table(embedding: nn.Module) -> Tensor | None:
    """Return the rows of an embedding by token; ``None`` if it does more than look them up."""
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return None
    if getattr(embedding.forward, "__func__", None) is not nn.Embedding.forward:
        return None
    weight: Tensor = embedding.weight
    return weight if type(weight) is nn.Parameter else None  # quantised ones are of other types


class OwnLayer(nn.Module):
    """Base of layers that take over the modules of a decoder layer of transformers."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, module in layer.named_children():
            setattr(self, name, module)


class DraftHead(nn.Module, DraftModel):
    """Base of draft heads, whose layers have the classes that transformers has for a config.

    They attend through the attention registry of transformers: a head runs within
    ``graphkit.models.running.attending``, or over the pools of an engine. ``prepare`` lets it run
    through graphkit's ops.

    A head uses the embedding and the output head of its target unless it has its own. Those of the
    target are not in its ``state_dict`` or ``parameters``, and do not move with it. ``forward`` and
    ``logits`` never synchronise and have static shapes, so that they can be captured.

    Args:
        config: Sizes and options of the layers, of a type of ``config.TYPES``.
        target: The model that the head drafts for.
        has_embedding: Whether the head has its own embedding.
        has_head: Whether it has its own output head.
        vocab_size: Tokens of its own output head; ``None`` for those of the target.

    Attributes:
        config: A copy of ``config``.
        rotary_emb: The frequencies of the rotation. They stay float32 when the head is cast: at
            large positions, rounded ones would change the angles by radians.
        layout: Attention of the layers, and what is replaced in them; set by ``prepare``.

    Raises:
        ConfigError: Layers of the config are not supported, or do not match the target.
    """

    lm_head: nn.Linear

    def __init__(
        self,
        config: PreTrainedConfig,
        target: HeadSources,
        *,
        has_embedding: bool = False,
        has_head: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        check_layers(config)
        check_fit(config, target)
        self.config = deepcopy(config)
        with torch.device("meta"):
            decoder: Any = AutoModel.from_config(self.config)  # type: ignore[no-untyped-call]
        self.config._attn_implementation = IMPLEMENTATION
        self._layer_class, self._norm_class = type(decoder.layers[0]), type(decoder.norm)
        self._rotary_class = type(decoder.rotary_emb)
        self.rotary_emb = self._new_rotation(torch.get_default_device())
        embedding = target.embedding
        if has_embedding:
            self.embed_tokens = embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if has_head:
            self.lm_head = Linear(config.hidden_size, vocab_size or config.vocab_size, bias=False)
        # Functions, because assigning a module would register it as a submodule.
        self._embed, self._inputs = embedding.forward, partial(join_inputs, embedding)
        self._target_logits = None if has_head else target.lm_head.__call__

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the hidden states: that of the norms, which are not quantised."""
        norm: nn.Module = next(m for m in self.modules() if isinstance(m, self._norm_class))
        return norm.get_parameter("weight").dtype

    @property
    def tp_plan(self) -> Mapping[str, str]:
        """The style of each module that ranks split, by name; see ``tensor_parallel``."""
        plan = self.config.base_model_tp_plan or {}
        gathered = (name for name, _ in self.named_modules() if name.split(".")[-1] in _GATHERED)
        return {**plan, **dict.fromkeys(gathered, "colwise_gather_output")}

    @abstractmethod
    def run_random(self, positions_T: Tensor) -> Any:
        """Run the head over random rows at positions, and return the results of its modules."""

    def prepare(self, *, fuse: bool = True) -> ModelLayout:
        """Let the head run over graphkit's pools, in place, and return its layers with state.

        Call it once the weights are in place. A second call changes nothing. Products of fused
        layers have no gradients.

        Args:
            fuse: See ``graphkit.models.load``.
        """
        if "layout" not in vars(self):
            device = self.rotary_emb.get_buffer("inv_freq").device
            root = observe(self, self.run_random, torch.arange(ROWS, device=device))
            names = {module: name for name, module in self.named_modules()}
            layers = (
                AttentionLayer(
                    names[call.module], call.key.shape[1], call.key.shape[-1],
                    call.value.shape[-1], call.scaling, call.window,
                )
                for module in root.walk() for call in module.attention
            )  # fmt: skip
            layout = ModelLayout(tuple(layers), ())
            longest = self.config.max_position_embeddings
            if fuse:
                layout = fuse_modules(self, layout, self.run_random, device, longest=longest)
            self.layout = layout
        return self.layout

    def new_layer(self, number: int) -> nn.Module:
        """Return a decoder layer."""
        layer: nn.Module = self._layer_class(self.config, number)
        return layer

    def new_norm(self) -> nn.Module:
        """Return a norm of rows of the hidden size, of the class of the layers."""
        norm: nn.Module = self._norm_class(self.config.hidden_size, eps=self.config.rms_norm_eps)
        return norm

    def decode(
        self, layers: Iterable[nn.Module], hidden_TH: Tensor, positions_T: Tensor, **options: Any
    ) -> Tensor:
        """Run decoder layers over rows, [T, H]. Layers of own classes may take options.

        Returns:
            The residual stream, [1, T, H]. Its last sum may wait for the norm behind the layers,
            see ``graphkit.models.residual``: take ``[0]`` of it after that norm.
        """
        hidden_1TH = hidden_TH[None]
        rotation = self.rotary_emb(hidden_1TH, positions_T[None])
        for layer in layers:
            hidden_1TH = layer(hidden_1TH, position_embeddings=rotation, **options)
        return hidden_1TH

    def random_rows(self, count: int, size: int) -> tuple[Tensor, Tensor]:
        """Return random token ids, [count], and rows, [count, size], in the dtype of the head."""
        like, generator = next(self.parameters()), torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.vocab_size, (count,), generator=generator)
        rows = torch.randn(count, size, generator=generator)
        return ids.to(like.device), rows.to(like.device, self.dtype)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Apply what is behind the layers, and the output head: [T, H] to [T, V]."""
        logits_TV: Tensor = (self._target_logits or self.lm_head)(hidden_TH)
        return logits_TV

    def predict(self, *rows: Tensor) -> tuple[Tensor, Tensor]:
        """Run the head; return the logits and the hidden states of all rows."""
        hidden_TH: Tensor = self(*rows)
        return self.logits(hidden_TH), hidden_TH

    def _forward(self, attention: LayerGroupAttention, spec: SpecConfig) -> Any:  # noqa: ARG002
        return partial(self._run, attention)

    def _run(self, attention: LayerGroupAttention, inputs: Any) -> ForwardOutput:
        """Return logits of every row, or of each request's last row in DRAFT_EXTEND."""
        rows = inputs.input_ids, inputs.hidden_states, inputs.positions
        with self._over_pools(attention, inputs):
            if is_packed(inputs):
                hidden = last_rows(inputs, self(*rows))
                logits = self.logits(hidden)
            else:
                logits, hidden = self.predict(*rows)
        return ForwardOutput(next_token_logits=logits, hidden_states=hidden)

    def _new_rotation(self, device: torch.device) -> nn.Module:
        """Return a rotation whose frequencies are computed on the CPU, equal for all devices."""
        with torch.device("cpu"):
            rotation: nn.Module = self._rotary_class(self.config)
        return rotation.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.rotary_emb.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.rotary_emb.get_buffer("inv_freq").device
        if before["inv_freq"].device != device:
            before = dict(self._new_rotation(device).named_buffers())
        # The same tensors on the same device, whose addresses captured graphs contain.
        for name, buffer in before.items():
            setattr(self.rotary_emb, name, buffer)
        return self
