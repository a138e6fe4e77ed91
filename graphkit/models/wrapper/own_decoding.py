"""What the logits of a prompt differ by from those of the model's own decoding.

A model adds in another order for a prompt than for a new token: recurrent layers compute the states
of a prompt in chunks, and libraries multiply few rows by other kernels. Where a layer divides by a
small number, the difference grows. So it is measured where it matters: on the same sequence,
without a wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import nn

from graphkit.models.wrapper.choices import joined_choices, taking_choices
from graphkit.models.wrapper.model_logits import ModelLogits, ModelRun
from graphkit.models.wrapper.row_differences import RowDifferences

_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of the cache among the arguments and in the output of models of transformers."""


def cache_argument(model: nn.Module) -> str:
    """Return the argument of a model of transformers that takes its cache; empty without one."""
    parameters = signature(model.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), "")


def decoding_differences(
    logits: ModelLogits, run: ModelRun, rows_at_once: int
) -> RowDifferences | None:
    """Compare the logits of a sequence with those of its tokens one by one over the model's cache.

    Modules that choose take the choices of the run on the whole sequence.

    Args:
        logits: The model.
        run: Its run on the sequence.
        rows_at_once: Rows of the sequence whose logits are computed at once.

    Returns:
        The differences, [N]; ``None`` for a function, and for a model that fails or has no cache.
    """
    parts: list[RowDifferences] = []
    decoded = _decoded(logits, run)
    for start in range(0, len(run.tokens), rows_at_once):
        positions = range(start, min(start + rows_at_once, len(run.tokens)))
        for row in run.rows(positions):
            got = next(decoded)
            if got is None:
                return None
            parts.append(RowDifferences.of(row[None], got))
    return RowDifferences.joined(parts)


def _decoded(logits: ModelLogits, run: ModelRun) -> Iterator[torch.Tensor | None]:
    """Yield the logits of each token, [1, V], or ``None`` if the model does not decode."""
    model: Any = logits.model
    parameters = signature(model.forward).parameters if isinstance(model, nn.Module) else {}
    name = cache_argument(model) if isinstance(model, nn.Module) else ""
    cache = None
    for position, token in enumerate(run.tokens):
        choices = joined_choices([(run.choices, [0], [position])], 1)
        options: dict[str, Any] = {"use_cache": True, name: cache}
        if "position_ids" in parameters:  # a cache may not know its length, such as that of Bamba
            options["position_ids"] = torch.tensor([[position]], device=logits.device)
        ids, output = torch.tensor([[token]], device=logits.device), None
        taking = taking_choices(logits.paths, choices, 1)
        with suppress(Exception), torch.no_grad(), taking:  # a model may raise anything
            output = model(ids, **options)
        cache = getattr(output, name, None)
        yield None if output is None or cache is None else output.logits[0]
