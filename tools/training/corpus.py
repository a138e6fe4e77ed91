"""Source files as bytes: training files, held-out files, and windows of both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from graphkit.models.tokenizer import END_OF_TEXT

CONTEXT = 512
# Folders that differ between distributions of Python, and tables that are not code.
SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def is_held_out(name: str) -> bool:
    """Return whether a file is held out: about 5 % of files, chosen by a hash of the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % 20 == 0


def read_corpus(root: Path, *, held_out: bool) -> Tensor:
    """Join the held-out or the training files by name, END_OF_TEXT after each: uint8 [bytes]."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(path.as_posix() for path in paths if not SKIPPED & set(path.parts))
    chosen = [root / name for name in names if is_held_out(name) is held_out]
    joined = b"".join(path.read_bytes() + bytes([END_OF_TEXT]) for path in chosen)
    if len(joined) <= CONTEXT:
        kind = "held-out" if held_out else "training"
        raise SystemExit(
            f"error: {root} contains {len(joined)} bytes of {kind} source, but training needs more "
            f"than {CONTEXT}. Pass a larger --source folder."
        )
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def windows_at(corpus: Tensor, starts: Tensor) -> Tensor:
    """Return the windows that start at ``starts`` [B]: int64 [B, CONTEXT + 1]."""
    return corpus[starts[:, None] + torch.arange(CONTEXT + 1, device=corpus.device)].long()


def random_windows(corpus: Tensor, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yield random windows [B, CONTEXT + 1] endlessly, on the device of the corpus."""
    generator = torch.Generator(corpus.device).manual_seed(seed)
    starts = torch.empty(batch_size, dtype=torch.long, device=corpus.device)
    while True:
        yield windows_at(corpus, starts.random_(0, len(corpus) - CONTEXT, generator=generator))


def all_windows(corpus: Tensor, batch_size: int, most: int | None = None) -> tuple[Tensor, ...]:
    """Return non-overlapping windows in batches [B, CONTEXT + 1]; the last may be smaller.

    With ``most``, that many of them, evenly spread over the corpus.
    """
    starts = torch.arange(0, len(corpus) - CONTEXT, CONTEXT, device=corpus.device)
    if most is not None and most < len(starts):
        starts = starts[torch.arange(most, device=corpus.device) * len(starts) // most]
    return windows_at(corpus, starts).split(batch_size)
