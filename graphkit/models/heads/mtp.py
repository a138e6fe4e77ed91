"""MTP layers that the folder of a model ships, and that transformers leaves out when it loads it.

An MTP layer merges the embedding of the next token and a hidden state, and runs a decoder layer of
the target over them (arXiv 2412.19437, section 2.2). Here it is the target's decoder with that
layer alone, so that positions, masks and arguments of the layer are what the target passes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.buffers import MultiLayerDraftExtendInputs
from graphkit.engine import Drafter, EagleDrafter, EngineModel, MultiLayerDrafter
from graphkit.errors import CheckpointError, ConfigError
from graphkit.models.folder import abbreviate
from graphkit.models.folder_weights import read_tensors
from graphkit.models.heads.draft_model import DraftModel, last_rows
from graphkit.models.layout import ModelLayout, decoder_layers, head_shape, output_head
from graphkit.models.plain_tensors import PlainTensors, plain_tensors
from graphkit.models.pools import LayerGroupAttention
from graphkit.models.prepare import prepare_model
from graphkit.models.quantization.linear import quantize_linears, set_row_invariant
from graphkit.models.stored_tensors import is_of_rounding, targets
from graphkit.models.tensor_parallel import RankSplit
from graphkit.models.weight_reads import dequantize_read_weights
from graphkit.ops.rows import gather_rows
from graphkit.runners import ForwardOutput
from graphkit.spec import ForwardMode, SpecConfig

logger = logging.getLogger(__name__)
_CHAIN = "MULTI_LAYER_EAGLE"
"""EAGLE with one draft layer per step."""
_BEHIND = {
    "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm",
}  # fmt: skip
"""DeepSeek-V3 and GLM: layer i is ``layers.{N + i}`` behind the N layers of the model."""
_BESIDE = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
    "norm": "norm",
}  # fmt: skip
"""Qwen3-Next and Qwen3.5: layer i is ``mtp.layers.{i}``; all layers share these modules."""
_HEAD_COPY, _EMBEDDING_COPY = "block.shared_head.head.weight", "block.embed_tokens.weight"
"""Stored copies of the target's output head and embedding, which the layers share with it."""
_MERGING = ("enorm", "hnorm", "eh_proj")
"""Modules of a layer before its block."""
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")
_PER_LAYER = ("layer_types", "mlp_layer_types")
"""Settings with one entry per layer that a decoder of transformers 5.23 reads in its forward."""


class MtpLayer(nn.Module):
    """One MTP layer. Fill its weights, then call ``prepare``.

    Args:
        target: The model that it drafts for, as transformers runs it.
        layers: Layers of the target.
        template: Index of the one whose class and settings this layer has.
        own: The layer and the norm behind it; ``None`` for copies of those of the target.

    Attributes:
        layout: Its layers with state, one attention, set by ``prepare``.
    """

    layout: ModelLayout

    def __init__(
        self,
        target: PreTrainedModel,
        layers: nn.ModuleList,
        template: int,
        own: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        decoder: PreTrainedModel = target.get_decoder()  # type: ignore[no-untyped-call]
        path = next(name for name, each in decoder.named_modules() if each is layers)
        shared = {id(each): each for each in (*decoder.parameters(), *decoder.buffers())}
        self.decoder: PreTrainedModel = deepcopy(decoder, shared)
        parts = layers.get_submodule(str(template)), decoder.get_submodule("norm")
        self.block, norm = own or (deepcopy(part) for part in parts)
        self.decoder.set_submodule(path, nn.ModuleList([self.block]))
        self.decoder.set_submodule("norm", norm)
        config = self.decoder.config
        config.num_hidden_layers = 1
        for name in _PER_LAYER:
            if getattr(config, name, None) is not None:
                setattr(config, name, [getattr(config, name)[template]])
        for module in self.block.modules():
            for name, value in (("layer_idx", 0), ("config", config)):
                if hasattr(module, name):
                    setattr(module, name, value)
        self.enorm, self.hnorm = deepcopy(self.norm), deepcopy(self.norm)
        size = head_shape(target)[1]
        self.eh_proj = nn.Linear(2 * size, size, bias=False, dtype=target.dtype)
        self.to(target.device)

    def prepare(self, *, fuse: bool = True) -> None:
        """Let the layer run over graphkit's pools.

        Args:
            fuse: See ``graphkit.models.load``. Products of fused layers have no gradients.

        Raises:
            ConfigError: The layer keeps other state than keys and values of one attention.
        """
        dequantize_read_weights(self.decoder)
        self.layout = prepare_model(self.decoder, fuse=fuse, owner=self, run=self._run_random)
        if self.layout.recurrent or len(self.layout.attention) != 1:
            raise ConfigError(
                f"an MTP layer is a {type(self.block).__name__} with recurrent states or without "
                "attention. Drafters keep keys and values alone.",
                field="draft",
            )

    @property
    def norm(self) -> nn.Module:
        """The norm behind the block."""
        return self.decoder.get_submodule("norm")

    def _run_random(self, positions: torch.Tensor) -> torch.Tensor:
        """Run the layer over random rows at positions."""
        like, generator = self.norm.get_parameter("weight"), torch.Generator().manual_seed(0)
        shape = 2, len(positions), len(like)
        rows = torch.randn(shape, generator=generator).to(like.device, like.dtype)
        normed: torch.Tensor = self(*rows, positions)
        return normed

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden states after the norm.

        Shapes:
            embedded, hidden, result: [T, H]. positions: [T].
        """
        merged = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        out = self.decoder(
            inputs_embeds=merged[None], position_ids=positions[None], use_cache=False
        )
        normed: torch.Tensor = out.last_hidden_state[0]
        return normed


class MtpHead(nn.Module, DraftModel):
    """MTP layers of a model. They use its embedding and its output head.

    Row p of layer i takes the token of position p + 1 + i, and the hidden state of row p that the
    output head receives in layer i - 1, or in the target for layer 0.

    Args:
        target: The model.
        layers: The layers, prepared.
        algorithm: ``"EAGLE"`` drafts every step with the first layer, ``"MULTI_LAYER_EAGLE"`` one
            step with each; ``None`` selects the latter if there are several layers.
    """

    def __init__(
        self, target: PreTrainedModel, layers: Iterable[MtpLayer], algorithm: str | None = None
    ) -> None:
        super().__init__()
        self.chain = tuple(layers)
        self.layers = nn.ModuleList(self.chain)
        # Functions, because assigning a module would register it as a submodule.
        self._embed = target.get_input_embeddings().forward
        self.logits = output_head(target).__call__  # with its hooks
        self.algorithm = (algorithm or ("EAGLE", _CHAIN)[len(self.chain) > 1]).upper()
        if self.algorithm == _CHAIN:
            self.modes = (ForwardMode.MULTI_LAYER_EAGLE,)
            self.num_steps = min(self.num_steps, len(self.chain))

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the hidden states: that of the norms, which are not quantised."""
        return self.chain[0].norm.get_parameter("weight").dtype

    @property
    def layout(self) -> ModelLayout:  # type: ignore[override]
        """The attention and the indexers of all layers, and what is replaced in them."""
        layouts = [layer.layout for layer in self.chain]
        paths = [f"layers.{number}." for number in range(len(layouts))]

        def joined(name: str) -> dict[str, str]:
            return {
                f"{path}{key}": text
                for path, layout in zip(paths, layouts, strict=True)
                for key, text in getattr(layout, name).items()
            }

        return ModelLayout(
            tuple(
                replace(layer, name=f"{path}decoder.{layer.name}")
                for path, layout in zip(paths, layouts, strict=True) for layer in layout.attention
            ),
            (),
            tuple(indexer for layout in layouts for indexer in layout.indexers),
            joined("replaced"),
            joined("torch_products"),
            frozenset().union(*(layout.norm_sizes for layout in layouts)),
        )  # fmt: skip

    def forward(
        self, layer: int, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run one layer: ids and positions [T], hidden states [T, H] to [T, H]."""
        out: torch.Tensor = self.chain[layer](self._embed(input_ids), hidden, positions)
        return out

    def drafter(self, model: EngineModel) -> Drafter:
        """See ``DraftModel.drafter``."""
        return MultiLayerDrafter(model) if self.algorithm == _CHAIN else EagleDrafter(model)

    def _forward(self, attention: LayerGroupAttention, spec: SpecConfig) -> Any:
        layers, num_steps = len(self.chain), spec.longest.num_steps
        if self.algorithm != _CHAIN:
            return self.layer_forward(0, attention)
        if num_steps > layers:
            raise ConfigError(
                f"num_steps is {num_steps}, but the folder has {layers} MTP layers, one per step. "
                f"Set num_steps to a value from 1 to {layers}, or load the model with the "
                "algorithm EAGLE, which drafts with the first layer alone.",
                field="num_steps",
            )
        return [self.layer_forward(layer, attention) for layer in range(num_steps)]

    def layer_forward(self, layer: int, attention: LayerGroupAttention) -> Any:
        """Return the forward of one layer over pools of all layers."""
        first = sum(len(each.layout.indexers) for each in self.chain[:layer])
        return partial(self._run, layer, first, attention)

    def _run(
        self, layer: int, first_indexer: int, attention: LayerGroupAttention, inputs: Any
    ) -> ForwardOutput:
        """Return logits and hidden states of the rows that the mode needs."""
        with self._over_pools(attention, inputs, first_indexer=first_indexer):
            hidden = self(layer, inputs.input_ids, inputs.hidden_states, inputs.positions)
        is_chain = isinstance(inputs, MultiLayerDraftExtendInputs)
        rows = gather_rows(hidden, inputs.last_rows()) if is_chain else last_rows(inputs, hidden)
        logits = self.logits(rows)
        return ForwardOutput(next_token_logits=logits, hidden_states=hidden if is_chain else rows)


def load_mtp(
    target: PreTrainedModel,
    layout: ModelLayout,
    folder: str,
    split: RankSplit | None = None,
    *,
    algorithm: str | None = None,
    quantize: str | None = None,
    fuse: bool = True,
    row_invariant: bool = False,
) -> MtpHead:
    """Load the MTP layers in the folder of a model, which transformers runs as ``target``.

    Ranks split them as the layers of the target that they are like. Layers that the folder has
    quantised stay so. ``algorithm`` is that of ``MtpHead``, and the arguments behind it are those
    of ``graphkit.models.load``.

    Raises:
        ConfigError: The layers keep other state than keys and values.
        CheckpointError: The folder has no MTP layers, or their tensors are not those of a layer of
            the target.
    """
    stored = plain_tensors(Path(folder))
    layers = decoder_layers(target, layout)
    names = [name for name in stored.forms if not is_of_rounding(name)]
    found = _stored_layers(names, len(layers))
    if not found:
        raise CheckpointError(
            f"{folder!r} contains no MTP layers: it has neither tensors of a layer {len(layers)} "
            "with eh_proj (DeepSeek-V3, GLM-4.5), nor mtp.fc (Qwen3-Next, Qwen3.5)."
        )
    for tensors in found:
        _check_copies(target, stored, tensors, split, folder)
    chain = [_loaded(target, layers, stored, names, split) for names in found]
    for layer in chain:
        if quantize is not None:
            quantize_linears(layer.block, quantize)
        set_row_invariant(layer, row_invariant)
        layer.prepare(fuse=fuse)
    return MtpHead(target, chain, algorithm)


def _check_copies(
    target: PreTrainedModel,
    stored: PlainTensors,
    names: dict[str, str],
    split: RankSplit | None,
    folder: str,
) -> None:
    """Remove the copies from the names of a layer, and warn of those that are no copies."""
    modules: dict[str, Any] = {
        _HEAD_COPY: output_head(target), _EMBEDDING_COPY: target.get_input_embeddings(),
    }  # fmt: skip
    paths = {module: path for path, module in target.named_modules()}
    for name, module in modules.items():
        if name not in names:
            continue
        tensor, weight = stored.tensor(names[name]), module.weight
        part = None if split is None else split.parts.get(f"{paths[module]}.weight")
        tensor = tensor if part is None else part.of(tensor)
        is_quantized = weight.dtype.itemsize == 1  # its numbers are not those of the copy
        if not is_quantized and not torch.equal(tensor.to(weight), weight):
            logger.warning(
                "%s has %s, which is not used: MTP layers share the %s of their target, which "
                "differs, so that fewer drafts may be accepted.",
                folder, names[name], "output head" if name == _HEAD_COPY else "embedding",
            )  # fmt: skip
        del names[name]


def _loaded(
    target: PreTrainedModel,
    layers: nn.ModuleList,
    stored: PlainTensors,
    names: Mapping[str, str],
    split: RankSplit | None,
) -> MtpLayer:
    """Return a layer with the tensors of the folder, not prepared yet.

    transformers loads its block and its norm as those of a model with one layer. ``names`` maps
    names in ``MtpLayer`` to stored ones.
    """
    paths = {module: name for name, module in target.named_modules()}
    path, norm = paths[layers], paths[target.get_decoder().norm]  # type: ignore[no-untyped-call]
    block = {
        f"{path}.0.{name.removeprefix('block.')}": old
        for name, old in names.items()
        if name.startswith("block.")
    }
    if "norm.weight" in names:
        block[f"{norm}.weight"] = names["norm.weight"]
    config = deepcopy(target.config)
    config.tie_word_embeddings = False
    with torch.device("meta"):
        shape: Any = nn.Module.to(type(target)(config), target.dtype)
    every = shape.get_submodule(path)

    def leave(model: PreTrainedModel, layer: nn.Module) -> bool:
        """Leave a model a layer and the norm; return whether these are all that is stored."""
        _drop_others(model, {path, norm})
        model.set_submodule(path, nn.ModuleList([layer]))
        placed = {place.name for place in targets(model, block).values()}
        return placed == model.state_dict().keys()

    numbers = range(len(layers) - 1, -1, -1)
    template = next((n for n in numbers if leave(shape, every[n])), numbers[0])
    leave(shape, every[template])
    own_split = None if split is None else RankSplit(shape, split.group)
    tensors = stored.renamed(block)
    read = read_tensors(
        shape, tensors, target.device, own_split,
        create=lambda model: leave(model, model.get_submodule(path)[template]),  # type: ignore[index]
    )  # fmt: skip
    report, held = read.report, read.held.weights.keys()
    wrong = {name for name, *_ in report["mismatched_keys"]} | {*report["unexpected_keys"]}
    wrong |= {*report["missing_keys"]} - held
    if wrong:
        raise _misfit(target, f"tensors of {abbreviate(sorted(wrong))} are missing, or differ")
    read.install()
    if own_split is not None:
        own_split.install(read.model)
    own = read.model.get_submodule(path)[0], read.model.get_submodule(norm)  # type: ignore[index]
    layer = MtpLayer(target, layers, template, own)
    places = {f"{part}.weight": getattr(layer, part).weight for part in _MERGING}
    merging = {name: old for name, old in names.items() if not name.startswith(("block.", "norm."))}
    try:
        stored.renamed(merging).fill(layer, places, target.device)
    except CheckpointError as error:
        raise _misfit(target, str(error)) from error
    tensors.warn_dequantised(read.dequantised, target.dtype)
    return layer.eval().requires_grad_(False)


def _misfit(target: PreTrainedModel, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the MTP layers in the folder do not fit {type(target).__name__}: {reason}"
    )


def _drop_others(model: PreTrainedModel, kept: Collection[str]) -> None:
    """Leave a model the modules with some names; in place. Its output head is deleted."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    above = {name.rpartition(".")[0] for name in kept}
    above |= {name[:end] for name in above for end in range(len(name)) if name[end] == "."} | {""}
    for owner in above:
        for name, child in list(model.get_submodule(owner).named_children()):
            path = f"{owner}.{name}".removeprefix(".")
            if child is head:
                delattr(model.get_submodule(owner), name)
            elif path not in kept and path not in above:
                model.set_submodule(path, nn.Identity())


def _stored_layers(names: Iterable[str], num_layers: int) -> list[dict[str, str]]:
    """Return the stored name of each tensor of each MTP layer, by its name in ``MtpLayer``."""
    layers: dict[tuple[str, int], dict[str, str]] = {}
    shared: dict[str, str] = {}
    for name in names:
        place, is_beside = _LAYER.fullmatch(name), "mtp" in name.split(".")
        if place and (is_beside or int(place[2]) >= num_layers):
            tensors = layers.setdefault((place[1], int(place[2])), {})
            tensors[_renamed(place[3], {} if is_beside else _BEHIND)] = name
        elif is_beside:
            shared[_renamed(name.rpartition("mtp.")[2], _BESIDE)] = name
    found = [
        tensors | (shared if "mtp" in path.split(".") else {})
        for (path, _), tensors in sorted(layers.items())
    ]
    return [tensors for tensors in found if "eh_proj.weight" in tensors]


def _renamed(name: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        if name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return f"block.{name}"
