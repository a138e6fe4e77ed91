"""The lower bound of a step's time: the weights that it reads, and the speed of memory."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from graphkit.cli.benchmarks.clocks import device_ms, synchronise
from graphkit.models.heads.dflash import DFlashHead
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.eagle3 import Eagle3Head
from graphkit.models.reference import EngineModels, MTPHead

if TYPE_CHECKING:
    from graphkit.models import TransformersModel

_COPIED_BYTES = 2**29
"""Ten times the L2 cache of an H100 or H200."""
_COPIES, _ROUNDS = 10, 5


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of weights that a step reads if it reads the weights of each forward once.

    Attributes:
        verify: Read by the target, once.
        drafts: Read by all draft steps together; each reads its layer and its head. A block of
            DFLASH is one forward.
    """

    verify: int
    drafts: int

    @classmethod
    def of(cls, models: EngineModels | TransformersModel, num_steps: int) -> WeightBytes:
        """Return the bytes of a step with so many draft steps.

        An embedding reads a row per token, which is left out unless it is also the output head.
        """
        target: nn.Module
        draft: nn.Module | None
        if isinstance(models, EngineModels):
            target, head, draft = models.target, models.target.lm_head.weight.nbytes, models.draft
        else:
            target, head = models.model, models.head.weight.nbytes
            draft = None if models.draft is None else models.draft.module
        return cls(_bytes_read(target), _draft_bytes(draft, head, num_steps))

    @property
    def total(self) -> int:
        """Bytes of the whole step."""
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
    """Return the bytes that all draft steps read.

    Args:
        draft: The draft model, if any.
        head: Bytes of the target's output head.
        num_steps: Number of draft steps.
    """
    match draft:
        case None:
            return 0
        case MTPHead():
            return sum(_bytes_read(layer) + head for layer in draft.layers[:num_steps])
        case DFlashHead():
            return _bytes_read(draft) + head
        case EagleHead() | Eagle3Head():
            shared = 0 if hasattr(draft, "lm_head") else head
            # EAGLE3 merges the target's features once
            once = _bytes_read(draft.fc) if isinstance(draft, Eagle3Head) else 0
            return num_steps * (_bytes_read(draft) - once + shared) + once
        case _:  # a causal language model
            return num_steps * _bytes_read(draft)


def _bytes_read(module: nn.Module) -> int:
    children = list(module.modules())
    embeddings = {id(child.weight) for child in children if isinstance(child, nn.Embedding)}
    heads = {id(child.weight) for child in children if isinstance(child, nn.Linear)}
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    return sum(parameters[key].nbytes for key in parameters.keys() - (embeddings - heads))
