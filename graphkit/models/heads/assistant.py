"""Assistants of Gemma 4: draft models that read the keys and values of their target.

The layers of an assistant have queries alone. Those of one type attend to the keys of the target's
last layer of that type that has keys of its own. An assistant merges the target's embedding of the
last token and a hidden state of the target's width: the target's for the first draft, then its own.
All drafts of a step are at one position, that of the bonus token, and see the committed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from graphkit.buffers import DraftExtendInputs, DraftInputs
from graphkit.errors import ConfigError
from graphkit.models.forward import IMPLEMENTATION
from graphkit.models.fusion import fuse_modules
from graphkit.models.heads.draft_model import WholeModelDraft
from graphkit.models.layout import AttentionLayer, ModelLayout, output_head
from graphkit.models.model import TransformersModel
from graphkit.models.pools import TargetKeys
from graphkit.models.residual import DeferredSums
from graphkit.models.running import AttentionCall, attending
from graphkit.models.versions import numbered
from graphkit.ops.rows import gather_rows
from graphkit.runners import ForwardOutput
from graphkit.spec import SpecConfig


class AssistantDraft(WholeModelDraft):
    """An assistant of Gemma 4, which then runs through graphkit alone.

    Args:
        model: A model of one of ``ASSISTANTS``, on the device and in the dtype of its target.
        target: The model that it drafts for.
        fuse: As for ``graphkit.models.load``.

    Raises:
        ConfigError: The assistant does not fit the target, or ranks split the target.
    """

    algorithm, reads_target = "EAGLE", True

    def __init__(
        self, model: PreTrainedModel, target: TransformersModel, *, fuse: bool = True
    ) -> None:
        if target.split is not None:
            raise ConfigError(
                f"{type(model).__name__} reads the keys and values of all heads of its target, "
                "which ranks split. Load both on one device.",
                field="draft",
            )
        super().__init__(model, ModelLayout((), ()))
        self._embed = target.model.get_input_embeddings().forward
        self._layers = _layers_with_keys(model, target)
        for config in (model.config, model.config.get_text_config()):
            config._attn_implementation = IMPLEMENTATION
        if model.config.use_ordered_embeddings:
            masked: Any = model.get_submodule("masked_embedding")
            masked.forward = partial(_centroid_logits, masked)
        # No layer reads their numbers, but transformers requires those of both types.
        like = output_head(model).weight
        self._unread = {
            kind: (like.new_zeros(1, layer.heads, 1, layer.value_size),) * 2
            for kind, (_, layer) in self._layers.items()
        }
        if fuse:
            longest = model.config.get_text_config().max_position_embeddings
            self.layout = fuse_modules(
                model, self.layout, self._run_random, model.device, longest=longest,
                kept=[output_head(model)],
            )  # fmt: skip

    def _forward(self, attention: Any, spec: SpecConfig) -> Any:  # noqa: ARG002
        return partial(self._run, attention)

    def _run(self, keys: TargetKeys, inputs: DraftInputs | DraftExtendInputs) -> ForwardOutput:
        """Return logits and hidden states of every row, or of each request's last packed row."""
        ids, hidden = inputs.input_ids, inputs.hidden_states
        if isinstance(inputs, DraftExtendInputs) and inputs.width is None:
            positions, metadata = inputs.positions + 1, inputs.attention
        else:
            if isinstance(inputs, DraftExtendInputs):
                last = inputs.last_rows()
                ids, hidden = ids[last], gather_rows(hidden, last)
            rows = len(ids) // max(inputs.batch_size, 1)
            positions = inputs.seq_lens.long().repeat_interleave(rows)
            metadata = keys.committed(inputs, rows)
        assert metadata is not None, "a runner sets it"

        def attend(call: AttentionCall) -> torch.Tensor:
            layer = self._layers[call.module.layer_type][0]
            # transformers counts a window from the last key, and includes both ends.
            window = call.window + 1 if call.window else 0
            query = call.query[0].transpose(0, 1)
            return keys.attend_stored(layer, query, metadata, window)[None]

        with attending(attend, positions), DeferredSums(self.layout.norm_sizes):
            logits, hidden = self._compute(torch.cat([self._embed(ids), hidden], -1), positions)
        return ForwardOutput(next_token_logits=logits, hidden_states=hidden)

    def _compute(
        self, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, [T, V], and hidden states, [T, H], of rows [T, 2 H] at positions [T]."""
        out = self._model(
            inputs_embeds=rows[None], position_ids=positions[None],
            shared_kv_states=self._unread, use_cache=False,
            logits_to_keep=None,  # 5.23 slices what assistants do not have for any number
        )  # fmt: skip
        return out.logits[0], out.last_hidden_state[0]

    def _run_random(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model over random rows at positions: a ``Run`` of ``fusion``."""
        shape = len(positions), 2 * self._model.config.backbone_hidden_size
        rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return self._compute(rows.to(positions.device, self.dtype), positions)


def _layers_with_keys(
    model: PreTrainedModel, target: TransformersModel
) -> Mapping[str, tuple[int, AttentionLayer]]:
    """Return number and sizes of the target's last layer with keys of its own, by type of layer.

    Raises:
        ConfigError: The assistant has other sizes, or a layer of a type that the target has not.
    """
    name, text, layers = type(model).__name__, model.config.get_text_config(), {}
    for number, layer in enumerate(target.layout.attention):
        module: Any = target.original.get_submodule(layer.name)
        if getattr(module, "is_kv_shared_layer", True) is False:
            layers[str(module.layer_type)] = number, layer
    facts = {
        "backbone_hidden_size": (model.config.backbone_hidden_size, target.head.in_features),
        "vocab_size": (text.vocab_size, target.head.out_features),
    }
    attentions: Any = (module for module in model.modules() if hasattr(module, "q_proj"))
    for module in attentions:
        kind = module.layer_type
        if kind not in layers:
            raise ConfigError(
                f"{name} reads keys and values of {kind}, but {type(target.model).__name__} has no "
                "such layer with keys of its own. Use the Gemma 4 model that it was trained for.",
                field="draft",
            )
        sizes, heads = layers[kind][1], text.num_attention_heads
        facts[f"head_dim of {kind}"] = module.head_dim, sizes.key_size
        facts[f"num_attention_heads % num_key_value_heads of {kind}"] = heads % sizes.heads, 0
    for fact, (value, expected) in facts.items():
        if value != expected:
            raise ConfigError(
                f"{name} has {fact} {value}, but its target has {expected}. Use the target that it "
                "was trained for.",
                field="draft",
            )
    return layers


def _sharing_modes(modes: Any, config: Any) -> Any:
    layers = config.num_hidden_layers
    return ["reuse"] * layers if config.num_kv_shared_layers == layers else modes(config)


# transformers 5.23 raises where all layers share keys; 5.22 and 5.24 do not.
if numbered(transformers.__version__) == (5, 23):
    _kind: Any
    for _kind in (transformers.Gemma4TextConfig, transformers.Gemma4UnifiedTextConfig):
        _kind.kv_sharing_modes = property(partial(_sharing_modes, _kind.kv_sharing_modes.fget))


def _centroid_logits(
    masked: Any, hidden_states: torch.Tensor, lm_head_weight: torch.Tensor
) -> torch.Tensor:
    """Return the logits of the tokens of the best centroids, and the lowest number for others.

    The method of transformers waits for the host, and its lowest number depends on the batch.

    Shapes:
        hidden_states: [1, T, H]. lm_head_weight: [V, H]. result: [1, T, V].
    """
    best = masked.centroids(hidden_states).topk(masked.centroid_intermediate_top_k).indices
    tokens = masked.token_ordering.view(masked.num_centroids, -1)[best].flatten(-2)
    logits = (lm_head_weight[tokens] @ hidden_states[..., None])[..., 0]
    others = logits.new_full((*tokens.shape[:-1], masked.vocab_size), torch.finfo(logits.dtype).min)
    return others.scatter(-1, tokens, logits)
