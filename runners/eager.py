"""The way of a batch that is not replayed: its live rows on the device, without padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from graphkit.buffers import Capacity, Inputs, admit, fields_of, resolve


def unpadded(batch: Any, inputs: type[Inputs], capacity: Capacity, device: torch.device) -> Inputs:
    """The batch as the forward's inputs: every field on the device, with its live rows alone.

    Raises:
        InputError: A field cannot be taken; its name is in the text.
    """
    width = batch.num_tokens // batch.batch_size
    letters = {**capacity.letters, "W": width}
    live = replace(
        capacity, requests=batch.batch_size, tokens_per_request=width, letters=letters
    )
    declared = [
        field
        for field in fields_of(inputs)
        if not field.optional or getattr(batch, field.name) is not None
    ]
    rows = {}
    for layout in resolve(declared, live):
        value = admit(layout, getattr(batch, layout.name), layout.capacity, device)
        rows[layout.name] = value.to(device)
    return inputs(**rows)
