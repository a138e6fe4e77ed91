"""What the tree ops demand of their arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphkit.errors import ConfigError, InputError


def demand_tensor(
    op: str,
    field: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Refuse a tensor of another shape, dtype or device.

    Raises:
        InputError: It names the op, the field, what came and what is taken.
    """
    fits = list(tensor.shape) == list(shape) and tensor.dtype in dtypes
    if not fits or tensor.device != device:
        raise InputError(
            f"{op} got {field} of {list(tensor.shape)} {tensor.dtype} on {tensor.device}: it must "
            f"be {list(shape)} {' or '.join(map(str, dtypes))} on {device}.",
            field=field,
        )


def demand_dense(op: str, **tensors: torch.Tensor) -> None:
    """Refuse what is written in place and is not contiguous.

    Raises:
        InputError: It names the op, the field and its strides.
    """
    for field, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise InputError(
                f"{op} got {field} of {list(tensor.shape)} with strides {list(tensor.stride())}: "
                "it is written in place, so it must be contiguous.",
                field=field,
            )


def demand_between(op: str, least: float, most: float, **numbers: float) -> None:
    """Refuse a number outside ``least`` to ``most``, NaN included.

    Raises:
        ConfigError: It names the op, the number and the bounds.
    """
    for field, number in numbers.items():
        if not least <= number <= most:
            raise ConfigError(
                f"{op} got {field} = {number}: it must be {least} to {most}.", field=field
            )
