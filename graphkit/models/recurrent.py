"""Recurrent layers of a transformers model over a pool of states.

A mixer of transformers knows one sequence per row of its batch and keeps its states in a cache.
Here its batch is one node of each request, or the beginning of a prompt, and the cache holds the
states before them. Suffixes: B requests, T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.engine.kv.recurrent_rows import States
from graphkit.models.cache import StateCache
from graphkit.models.fused_mixer import FusedMixer, fused_mixer
from graphkit.models.layout import ModelLayout, RecurrentLayer
from graphkit.models.running import NodeScan, running_scan
from graphkit.models.scans import computes_the_same, known_mixer, random_rows, scanned_forward

Run = Callable[[States, torch.Tensor], tuple[States, torch.Tensor]]
"""Runs a mixer from the states before rows over the rows, [B, T, H]: states after, outputs."""


def convert_mixers(model: PreTrainedModel, layout: ModelLayout) -> ModelLayout:
    """Let the recurrent layers of a model run over the pool of the running batch; in place.

    Returns:
        The layout, with what the layers compute if all of them are known.
    """
    modules = dict(model.named_modules())
    layers = [
        known_mixer(modules[layer.name], layer, model.device, model.dtype)
        for layer in layout.recurrent
    ]
    known = [layer for layer in layers if layer is not None]
    if len(known) == len(layers) and len({layer.recurrence for layer in known}) <= 1:
        layout = replace(layout, recurrent=tuple(known))
    replaced, torch_products = dict(layout.replaced), dict(layout.torch_products)
    for number, layer in enumerate(layout.recurrent):
        mixer = modules[layer.name]
        if layer.runs_at_once:
            mixer.forward = forward = _at_once(mixer, layer, number, model)
            replaced[layer.name] = forward.text
            if isinstance(forward, FusedMixer):  # it runs nothing else
                torch_products.pop(layer.name, None)
        else:
            mixer.forward = PooledMixer(mixer.forward, layer, number)
    return replace(layout, replaced=replaced, torch_products=torch_products)


def _at_once(
    mixer: nn.Module, layer: RecurrentLayer, number: int, model: PreTrainedModel
) -> ScannedMixer | FusedMixer:
    """Return the forward of a known mixer: as few launches as possible, or its own."""
    forward, first = scanned_forward(mixer, layer, number), scanned_forward(mixer, layer, 0)
    assert forward is not None and first is not None, "the mixer is known"  # noqa: PT018
    rows = random_rows(mixer, model.device, model.dtype)
    fused = fused_mixer(mixer, layer, first, rows)
    if fused is not None and computes_the_same(mixer, fused, layer, rows):
        fused.number = number
        return fused
    return ScannedMixer(forward, layer)


class ScannedMixer:
    """A mixer that computes all rows of the running batch in one call.

    Attributes:
        text: What runs, for ``ModelLayout.replaced``.
    """

    def __init__(self, forward: Callable[..., torch.Tensor], layer: RecurrentLayer) -> None:
        self._forward, self._argument = forward, layer.cache_argument
        ops = ["causal_conv"] * ("conv0" in layer.shapes)
        ops += ["linear_scan"] * (layer.recurrence is not None)
        self.text = f"itself with {' and '.join(f'graphkit::{name}' for name in ops)}"

    def __call__(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        """Run the mixer over the rows of a batch, [1, T, H]; takes the arguments of the mixer."""
        return self._forward(hidden_states, **others | {self._argument: StateCache()})


class PooledMixer:
    """A mixer over the states of the running batch.

    The nodes of a step run one after the other, parents before their children, because the state
    after each of them is kept. The rows that begin a prompt run in one call, from states of zeros.
    A later chunk of a prompt runs row by row: a mixer may ignore the state before several rows.
    """

    def __init__(self, forward: Callable[..., Any], layer: RecurrentLayer, number: int) -> None:
        self._forward, self._layer, self._number = forward, layer, number

    def __call__(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        """Run the mixer over the rows of a batch, [1, T, H]; takes the arguments of the mixer."""
        scan, rows = running_scan(), hidden_states[0]

        def run(states: States, rows: torch.Tensor) -> tuple[States, torch.Tensor]:
            cache: Any = StateCache(states)
            out = self._forward(rows, **others | {self._layer.cache_argument: cache})
            return cache.states, out

        def update(states: States, row: torch.Tensor) -> tuple[States, torch.Tensor]:
            # The pool keeps the states of ended prompts, and a mixer may write those that it reads.
            if scan.slots.is_row is not None:
                states = {name: state.clone() for name, state in states.items()}
            states, out = run(states, row[:, None])
            return states, out[:, 0]

        if scan.prompts is None:
            return scan.pool.scan(self._number, scan.slots, update, rows)[None]
        return self._run_prompts(scan, scan.prompts, run, rows)[None]

    def _run_prompts(
        self, scan: NodeScan, prompts: Sequence[range], run: Run, rows: torch.Tensor
    ) -> torch.Tensor:
        """Run prompts one after the other; takes and returns rows, [T, H]."""
        slots, parts, end = scan.slots, list[torch.Tensor](), 0
        states: States = scan.pool.load(self._number, slots.before[:, 0])
        ended: list[States] = []
        for request, span in enumerate(prompts):
            begin, end = end, end + len(span)
            own: States = {name: state[request : request + 1] for name, state in states.items()}
            for chunk in rows[None, begin:end].split(len(span) if span.start == 0 else 1, 1):
                own, out = run(own, chunk)
                parts.append(out[0])
            ended.append(own)
        after = {name: torch.cat([own[name] for own in ended]) for name in states}
        scan.pool.store(self._number, slots.after[:, -1], after)
        return torch.cat(parts)
