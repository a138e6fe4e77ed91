"""Fusion of a loaded model, in place, and the gated networks among its modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from graphkit.models.fusion.heads import RotatedAttention, find_rotated_attention
from graphkit.models.fusion.latents import LatentAttention
from graphkit.models.fusion.linears import MergedLinears, merge_linears, plain_linears
from graphkit.models.fusion.norms import defer_products, find_norms
from graphkit.models.fusion.observation import (
    ROWS,
    ModuleCall,
    Run,
    agree,
    observe,
    random_rows,
    run_at,
)
from graphkit.models.fusion.routers import find_routers, find_shared_experts
from graphkit.models.layout import AttentionLayer, ModelLayout
from graphkit.models.quantization.linear import Linear, QuantizedLinear
from graphkit.models.running import Intercepted
from graphkit.ops.linear import project

Project = Callable[..., torch.Tensor]
_log = logging.getLogger(__name__)


def find_gated_networks(
    root: ModuleCall,
    linears: Collection[nn.Module],
    merged: Mapping[nn.Module, MergedLinears],
) -> dict[nn.Module, Project]:
    """Return the called modules that compute ``down(silu(gate(rows)) * up(rows))``."""
    networks = {
        module: _gated_network(call, linears, merged) for module, call in root.by_module().items()
    }
    return {module: network for module, network in networks.items() if network is not None}


def _gated_network(
    call: ModuleCall,
    linears: Collection[nn.Module],
    merged: Mapping[nn.Module, MergedLinears],
) -> Project | None:
    rows = call.only_input()
    used = [inner for inner in call.calls if inner.module in linears]
    if rows is None or not 2 <= len(used) <= 3 or "forward" in vars(call.module):
        return None
    down, readers = used[-1].module, [inner for inner in used if inner.only_input() is rows]
    first = used[0].module
    if not isinstance(first, nn.Linear | QuantizedLinear):
        return None
    gate_up: Project = merged.get(first, first)
    layers = gate_up.layers if isinstance(gate_up, MergedLinears) else (first,)
    widths = {len(layer.weight) for layer in layers}  # type: ignore[arg-type]
    if [inner.module for inner in readers] != list(layers) or len(used) != len(layers) + 1:
        return None
    if len(widths) > 1 or sum(len(layer.weight) for layer in layers) % 2:  # type: ignore[arg-type,misc]
        return None
    network, sample = partial(_run_gated, gate_up, down), random_rows(rows, seed=0)
    try:
        got = network(sample)
    except RuntimeError:  # the products have other shapes
        return None
    return network if agree(call.module.forward(sample), got) else None


def _run_gated(gate_up: Project, down: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Run a gated network over rows, [..., H].

    ``gate_up`` projects to the columns of the gate, then as many of the up projection.
    """
    out: torch.Tensor = down(gate_up(hidden_states, swiglu=True))
    return out


def fuse_modules(
    model: nn.Module,
    layout: ModelLayout,
    run: Run,
    device: torch.device,
    *,
    longest: int | None,
    latents: Mapping[nn.Module, AttentionLayer] = MappingProxyType({}),
    kept: Collection[nn.Module] = (),
) -> ModelLayout:
    """Let modules of a model run through graphkit's ops, in place, and return what was replaced.

    Parameters keep their names and values, and are held once: those of merged layers become views
    of one tensor.

    Args:
        model: The model, or a part of one.
        layout: Its layers with state.
        run: Runs it; see ``Run``.
        device: Its device.
        longest: Its largest number of positions; ``None`` if unknown.
        latents: Modules with latent attention, and what the layout has of them.
        kept: Linear layers that are not merged. Their weights may be those of other modules, too.
    """
    near = torch.arange(ROWS, device=device)
    far = (near + 1) * max(1, (longest or 64) // ROWS) - 1
    observed = [(observe(model, run, far), far), (observe(model, run, near), near)]
    root, _ = observed[-1]
    names = {module: name for name, module in model.named_modules()}
    linears = plain_linears(root)
    groups = merge_linears(root, linears, near)
    merged = {layer: group for group in groups for layer in group.layers}
    alone = linears - {*merged, *kept}
    texts = dict[nn.Module, str]()
    for group in groups:
        product = "one product of " + ", ".join(names[layer] for layer in group.layers)
        texts |= dict.fromkeys(group.layers, product)
    for layer in _single_linears(root, alone, kept):
        layer.forward = MethodType(Linear.forward, layer)
        texts[layer] = "graphkit::linear"
    norms = find_norms(root)
    networks = find_gated_networks(root, linears, merged)
    heads = find_rotated_attention(observed, latents, linears, merged, norms)
    texts |= _install(norms, "graphkit::rms_norm")
    texts |= _install(networks, "graphkit::silu_and_mul within a product")
    for kind, op in ((RotatedAttention, "rotated"), (LatentAttention, "latent")):
        of_kind = {module: head for module, head in heads.items() if isinstance(head, kind)}
        texts |= _install(of_kind, f"graphkit::store_{op}_heads before attention")
    routers = find_routers(root)
    texts |= _install(routers, "graphkit::linear and graphkit::choose_experts")
    blocks = find_shared_experts(root, routers, networks, linears)
    texts |= _install(blocks, "graphkit::expert_sum of its parts")
    unused = _without_unused(root, run, near, heads.values())
    own_linears, others_of_torch = _products_of_torch(root, {*linears, *texts})
    for module in own_linears:
        module.forward = partial(_run_by_op, module.forward)
    norm_sizes = frozenset(
        len(norms[call.module].weight)
        for call in root.walk()
        if call.module in norms and call.output.dim() == 3
    )
    defer_products(run, near, alone, norm_sizes)
    texts |= dict.fromkeys(own_linears, "graphkit::linear within its forward")
    texts |= dict.fromkeys(unused, "nothing, since its results are not used")
    if others_of_torch:
        _log.info(
            "rows of these modules may depend on the batch, since torch multiplies: %s",
            ", ".join(names[module] for module in others_of_torch),
        )
    return replace(
        layout,
        replaced={names[module]: text for module, text in texts.items()},
        torch_products={names[module]: text for module, text in others_of_torch.items()},
        norm_sizes=norm_sizes,
    )


def _single_linears(
    root: ModuleCall, alone: Collection[nn.Module], kept: Collection[nn.Module]
) -> list[nn.Module]:
    """Return called layers that no product was merged from, and kept layers that torch runs."""
    called = [layer for layer in root.by_module() if layer in alone]
    return [layer for layer in called if isinstance(layer, nn.Linear)] + [
        layer
        for layer in kept
        if type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)
    ]


def _install(forwards: Mapping[nn.Module, Callable[..., Any]], text: str) -> dict[nn.Module, str]:
    """Replace the forwards of modules, and return the text of each."""
    for module, forward in forwards.items():
        module.forward = forward
    return dict.fromkeys(forwards, text)


def _products_of_torch(
    root: ModuleCall, replaced: Collection[nn.Module]
) -> tuple[list[nn.Module], dict[nn.Module, str]]:
    """Return modules that multiply by ``linear`` alone, and functions of others that multiply."""
    calls = {
        module: call
        for module, call in root.by_module().items()
        if call.products and module not in replaced
    }
    own_linears = [
        module
        for module, call in calls.items()
        if set(call.products) == {"linear"}
        and "forward" not in vars(module)
        and all(type(weight) is nn.Parameter for weight in module.parameters())
    ]
    others = {
        module: ", ".join(dict.fromkeys(call.products))
        for module, call in calls.items()
        if module not in own_linears
    }
    return own_linears, others


def _run_by_op(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward whose calls of ``torch.nn.functional.linear`` run by ``graphkit::linear``.

    Such as that of a router, which keeps a weight of its own. Rows then do not depend on the batch.
    """

    def handle(function: Any, *args: Any, **kwargs: Any) -> Any:
        replaced = project if function is torch.nn.functional.linear else function
        return replaced(*args, **kwargs)

    with Intercepted(handle):
        return forward(*args, **kwargs)


def _without_unused(
    root: ModuleCall,
    run: Run,
    positions: torch.Tensor,
    heads: Iterable[RotatedAttention | LatentAttention],
) -> list[nn.Module]:
    """Omit modules of frequencies whose results nothing uses any more, and return them."""
    frequencies = {head.buffer.data_ptr() for head in heads}
    (expected, _), omitted = run_at(positions, run, positions), []
    for call in root.by_module().values():
        owned = {buffer.data_ptr() for buffer in call.module.buffers(recurse=False)}
        if not owned & frequencies or "forward" in vars(call.module):
            continue
        call.module.forward = partial(_returned, tree_map(lambda _: None, call.output))
        try:
            same = agree(expected, run_at(positions, run, positions)[0])
        except (TypeError, AttributeError):  # None, where a result is used
            same = False
        if same:
            omitted.append(call.module)
        else:
            del call.module.forward
    return omitted


def _returned(output: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Return an output without its tensors, in the place of a forward."""
    return output
