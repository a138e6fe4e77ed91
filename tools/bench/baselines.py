"""Other implementations of the same verify step, without graphkit."""

from __future__ import annotations

import copy

import torch
from timing import Variant
from verify_step import CAPTURED, DEVICE, HIDDEN, LIVE, WIDTH, Model, host_arrays


class CopiedGraph:
    """A CUDA graph over static buffers, as engines implement it by hand."""

    def __init__(self, model: Model) -> None:
        tokens = CAPTURED * WIDTH
        arrays = host_arrays()
        self.buffers = {
            name: torch.zeros(
                CAPTURED * (len(rows) // LIVE), dtype=torch.from_numpy(rows).dtype, device=DEVICE
            )
            for name, rows in arrays.items()
        }
        self.embeds = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        inputs = (self.embeds, *self.buffers.values())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                model(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = model(*inputs)
        self.pinned = {name: torch.from_numpy(rows).pin_memory() for name, rows in arrays.items()}
        self.heads = [self.buffers[name][: len(rows)] for name, rows in arrays.items()]
        self.tails = [self.buffers[name][len(rows) :] for name, rows in arrays.items()]

    def field_by_field(self, embeds: torch.Tensor) -> None:
        """Copy and pad field by field, then replay."""
        for head, tail, rows in zip(self.heads, self.tails, self.pinned.values(), strict=True):
            head.copy_(rows, non_blocking=True)
            tail.zero_()
        self.embeds[: len(embeds)].copy_(embeds)
        self.graph.replay()

    def foreach(self, embeds: torch.Tensor) -> None:
        """Copy and pad with grouped foreach operations, then replay."""
        torch._foreach_zero_(self.tails)
        torch._foreach_copy_(self.heads, list(self.pinned.values()), non_blocking=True)
        self.embeds[: len(embeds)].copy_(embeds)
        self.graph.replay()


def baselines(model: Model, embeds: torch.Tensor) -> dict[str, Variant]:
    """Return all baselines by name."""
    copied = CopiedGraph(model)
    pinned = list(copied.pinned.values())
    on_device = [rows.to(DEVICE) for rows in pinned]
    sample = (embeds.clone(), *(rows.clone() for rows in on_device))
    # make_graphed_callables replaces the forward of the module that it receives.
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(model), sample)
    compiled = torch.compile(Model.forward, mode="reduce-overhead")

    def uploaded() -> list[torch.Tensor]:
        return [rows.to(DEVICE, non_blocking=True) for rows in pinned]

    return {
        "field-by-field copies + replay": Variant(lambda _: copied.field_by_field(embeds)),
        "grouped foreach copies + replay": Variant(lambda _: copied.foreach(embeds)),
        "make_graphed_callables": Variant(lambda _: graphed(embeds, *uploaded())),
        "make_graphed_callables, inputs on device": Variant(lambda _: graphed(embeds, *on_device)),
        "torch.compile reduce-overhead": Variant(lambda _: compiled(model, embeds, *uploaded())),
        "torch.compile reduce-overhead, inputs on device": Variant(
            lambda _: compiled(model, embeds, *on_device)
        ),
        "eager": Variant(lambda _: model(embeds, *on_device)),
    }
