"""The captured step alone, and the lower bound of its time: its weights at the speed of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from graphkit.engine.step import SpecStepInputs, SpecStepRunner
from graphkit.graphs import Attribution
from graphkit.graphs.streams import restore_fast_replays
from graphkit.models.experts import counting_experts, experts_of
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.mtp import MtpHead

if TYPE_CHECKING:
    from graphkit.models import TransformersModel

_COPIED_BYTES = 2**29
"""Ten times the L2 cache of an H100 or H200."""
_COPIES, _ROUNDS = 10, 5


def synchronise(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def device_ms(device: torch.device) -> Iterator[list[float]]:
    """Measure the device's time of a block; the list has the milliseconds after it."""
    result: list[float] = []
    if device.type == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield result
        after.record()
        after.synchronize()
        result.append(before.elapsed_time(after))
    else:
        began = time.perf_counter()
        yield result
        result.append((time.perf_counter() - began) * 1e3)


class BareStep:
    """The greedy step of running requests, captured on its own and replayed without an engine.

    It is the step that the loops of an engine run for requests with temperature 0; ``replay`` of
    the engine's own runner can also sample. The step shares the state of that runner, and advances
    its requests. The caller closes it before the engine.

    Args:
        runner: A captured runner.
        rows: Rows of running requests with temperature 0, as many as a captured size.
    """

    def __init__(self, runner: SpecStepRunner, rows: Sequence[int]) -> None:
        step = runner.spec_step
        self._runner = SpecStepRunner.from_step(step, replace(step.context.options, is_greedy=True))
        self._runner.capture(attribution=Attribution())
        restore_fast_replays(runner.device)  # at the speed of the engines
        self._step = step
        self._batch = SpecStepInputs(req_pool_indices=np.array(rows))

    def ms(self, steps: int) -> float:
        """Return the device's milliseconds per replay, back to back."""
        synchronise(self._runner.device)
        with device_ms(self._runner.device) as ms:
            for _ in range(steps):
                self._runner.replay(self._batch)
        return ms[0] / steps

    def nodes(self) -> dict[str, int]:
        """Return the number of nodes: all, and graphkit's own.

        Own nodes are outside of the models' modules. They are also counted by phase.
        """
        graph = self._runner.graphs[len(self._batch.req_pool_indices)]
        own = [o for o in graph.origins if not o.module or o.module.startswith("(")]
        phases = [origin.scope.partition("/")[0] or "rest" for origin in own]
        by_phase = {f"own nodes, {name}": phases.count(name) for name in dict.fromkeys(phases)}
        return {"nodes": graph.num_nodes, "own nodes": len(own), **by_phase}

    def expert_bytes(self, modules: Sequence[nn.Module], steps: int) -> float:
        """Return the bytes of the experts that a step reads, those of a forward once.

        The step is captured again for that, with nodes that count, and replayed ``steps`` times.
        """
        with counting_experts(modules) as counted:
            options = replace(self._step.context.options, is_greedy=True)
            runner = SpecStepRunner.from_step(self._step, options)
            runner.capture()
            synchronise(runner.device)
            before = counted()
            for _ in range(steps):
                runner.replay(self._batch)
            read = counted() - before
            runner.close()
        return read / steps

    def close(self) -> None:
        """Close the graphs."""
        self._runner.close()


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of weights that a step reads if it reads the weights of each forward once.

    Those of experts are left out: rows choose them.

    Attributes:
        verify: Read by the target, once.
        drafts: Read by all draft steps together; each reads its layer and an output head. A
            block of DFLASH is one forward; each draft of DSPARK reads the Markov head.
        experts: The experts of target and draft model.
    """

    verify: int
    drafts: int
    experts: Sequence[nn.Module] = ()

    @classmethod
    def of(cls, model: TransformersModel, num_steps: int) -> WeightBytes:
        """Return the bytes of a step with so many draft steps.

        An embedding reads a row per token, which is left out unless it is also the output head.
        """
        draft = None if model.draft is None else model.draft.module
        head = model.head.weight.nbytes
        experts = [*experts_of(model.model), *([] if draft is None else experts_of(draft))]
        return cls(_bytes_read(model.model), _draft_bytes(draft, head, num_steps), experts)

    @property
    def total(self) -> int:
        """Bytes of the whole step, without experts."""
        return self.verify + self.drafts


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy on a CUDA device reads and writes.

    Allocates 1 GiB for the copy.
    """
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(_ROUNDS):
        synchronise(device)
        with device_ms(device) as ms:
            for _ in range(_COPIES):
                target.copy_(source)
        times += ms
    return 2 * _COPIED_BYTES * _COPIES / median(times) * 1e3


def _draft_bytes(draft: nn.Module | None, head: int, num_steps: int) -> int:
    """Return the bytes that all draft steps read; ``head`` are those of the target's head."""
    shared = 0 if hasattr(draft, "lm_head") else head
    match draft:
        case None:
            return 0
        case MtpHead():
            return sum(_bytes_read(layer) + head for layer in draft.chain[:num_steps])
        case DFlashHead():
            bias = 0 if draft.markov_head is None else _bytes_read(draft.markov_head)
            return _bytes_read(draft) + shared + (num_steps - 1) * bias
        case EagleHead() | Eagle3Head():
            # EAGLE3 merges the target's features once
            once = _bytes_read(draft.fc) if isinstance(draft, Eagle3Head) else 0
            return num_steps * (_bytes_read(draft) - once + shared) + once
        case _:  # a causal language model
            return num_steps * _bytes_read(draft)


def _bytes_read(module: nn.Module) -> int:
    children = list(module.modules())
    embeddings = {id(child.weight) for child in children if isinstance(child, nn.Embedding)}
    heads = {id(child.weight) for child in children if isinstance(child, nn.Linear)}
    chosen = {id(weight) for experts in experts_of(module) for weight in experts.parameters()}
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    read = parameters.keys() - (embeddings - heads) - chosen
    return sum(parameters[key].nbytes for key in read)
