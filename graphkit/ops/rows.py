"""Rows of tensors, read and written by index.

Dimensions: N rows to copy, M rows of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from graphkit.errors import InputError
from graphkit.ops.argument_rules import describe
from graphkit.ops.registration import register_op


def check_elements(op: str, field: str, rows: torch.Tensor) -> None:
    """Refuse elements that the kernels cannot copy."""
    if rows.element_size() > 8:
        raise InputError(
            f"{op}: {field} has elements of {rows.dtype}, expected at most 8 bytes. "
            "Pass torch.view_as_real of it.",
            field=field,
        )


def _check_source(args: Any) -> None:
    """Refuse elements that the kernel cannot copy, and rows of a tensor that has none."""
    check_elements("gather_rows", "source", args.source)
    if len(args.index) and not len(args.source):
        raise InputError(
            f"gather_rows: source is {describe(args.source)}, expected at least one row for the "
            f"{len(args.index)} rows of index.",
            field="source",
        )


@register_op(
    fake=lambda args: args.source.new_empty(args.index.shape[0], *args.source.shape[1:]),
    check=_check_source,
    differentiable=True,
)
def gather_rows(
    source: Annotated[torch.Tensor, "[M, ...]"],
    index: Annotated[torch.Tensor, "[N] int32 or int64"],
) -> torch.Tensor:
    """Return copies of rows of a tensor, as ``Tensor.index_select`` does.

    Args:
        source: The rows. An element has at most 8 bytes. Two-dimensional tensors are read in place,
            whatever their strides.
        index: Row of ``source`` of each row of the result. One outside ``source`` is an error on
            the CPU; on CUDA it counts as the nearest row.

    Returns:
        The rows, [N, ...], contiguous.
    """
    return source.index_select(0, index)


def _check_pairs(args: Any) -> None:
    """Refuse tensors that are no pairs: other counts, shapes, dtypes or devices."""
    targets, sources, index = args.targets, args.sources, args.index
    if len(targets) != len(sources):
        raise InputError(
            f"scatter_rows: sources has {len(sources)} tensors, expected {len(targets)}, one for "
            "each of targets.",
            field="sources",
        )
    for target, source in zip(targets, sources, strict=True):
        check_elements("scatter_rows", "targets", target)
        is_target = target.dim() and target.shape[:1] == targets[0].shape[:1]
        if not (is_target and target.is_contiguous() and target.device == index.device):
            raise InputError(
                f"scatter_rows: targets has {describe(target)}, expected contiguous tensors of "
                f"{list(targets[0].shape[:1])} rows on {index.device}.",
                field="targets",
            )
        shape = (len(index), *target.shape[1:])
        is_source = tuple(source.shape) == shape and source.dtype == target.dtype
        if not (is_source and source.device == index.device):
            raise InputError(
                f"scatter_rows: sources has {describe(source)}, expected {list(shape)} "
                f"{str(target.dtype).removeprefix('torch.')} on {index.device}.",
                field="sources",
            )


@register_op(mutates_args=("targets",), check=_check_pairs)
def scatter_rows(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    index: Annotated[torch.Tensor, "[N] int32 or int64"],
) -> None:
    """Write rows into tensors, as ``Tensor.index_copy_`` does; one launch for all tensors.

    If ``index`` has a row several times, the target keeps one of its sources, and which one is not
    defined.

    Args:
        targets: Receive the rows, each [M, ...] of any dtype, contiguous. An element has at most 8
            bytes.
        sources: Rows for each target, [N, ...] of any dtype, that of the target.
        index: Row of the targets of each row of the sources. One outside the targets is an error on
            the CPU; on CUDA its rows are dropped.
    """
    for target, source in zip(targets, sources, strict=True):
        target.index_copy_(0, index.long(), source)
