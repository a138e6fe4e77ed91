"""The options that select models and a speculative algorithm, and what they mean together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """Declare --algorithm, --topk, --num-steps and --num-draft-tokens."""
    parser.add_argument(
        "--algorithm", metavar="A",
        help="speculative algorithm, in any case: NONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, "
        "STANDALONE or NGRAM; default: EAGLE, or that of the --draft folder, or NGRAM for a "
        "--checkpoint without one",
    )  # fmt: skip
    parser.add_argument(
        "--topk", type=int, default=1, metavar="K",
        help="branches per draft step; default: 1, a chain",
    )  # fmt: skip
    parser.add_argument(
        "--num-steps", type=int, default=3, metavar="S", help="draft steps; default: 3"
    )
    parser.add_argument(
        "--num-draft-tokens", type=int, metavar="W",
        help="tokens per request in one verify, the root included; default: S + 1 for topk 1, else "
        "2 * (S + 1)",
    )  # fmt: skip


def algorithm_of(arguments: argparse.Namespace) -> str:
    """Return the algorithm in capitals; the default needs no more models than there are.

    Raises:
        CheckpointError: It is that of a draft folder which cannot be read.
    """
    if arguments.algorithm is not None:
        return str(arguments.algorithm).upper()
    if arguments.draft is not None:
        from graphkit.reference import head_algorithm

        return head_algorithm(arguments.draft)
    return "EAGLE" if arguments.checkpoint is None else "NGRAM"


def dtype_of(folder: Path | None, device: torch.device) -> torch.dtype:
    """Return the data type to run a folder in: its own on CUDA, float32 on the CPU.

    The reference model, ``None``, runs in float32.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    import torch

    from graphkit.reference import checkpoint_dtype

    if device.type == "cuda" and folder is not None:
        return checkpoint_dtype(folder)
    return torch.float32
