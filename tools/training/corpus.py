"""Source files as bytes: what is learned, what is held out, and windows of both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from graphkit.reference.tokenizer import END_OF_TEXT

CONTEXT = 512
# What differs between distributions of Python (packages, tests), and tables that are not code.
SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def is_held_out(name: str) -> bool:
    """Choose about 5 % of files by their name, the same ones on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % 20 == 0


def read_corpus(root: Path, *, held_out: bool) -> Tensor:
    """Join one side's files in the order of their names, END_OF_TEXT after each: uint8 [bytes]."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(path.as_posix() for path in paths if not SKIPPED & set(path.parts))
    chosen = [root / name for name in names if is_held_out(name) is held_out]
    joined = b"".join(path.read_bytes() + bytes([END_OF_TEXT]) for path in chosen)
    if len(joined) <= CONTEXT:
        raise SystemExit(f"error: {root} has too little source: {len(joined)} bytes {held_out=}.")
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def windows_at(corpus: Tensor, starts: Tensor) -> Tensor:
    """Return the windows that begin at ``starts`` [B]: int64 [B, CONTEXT + 1]."""
    return corpus[starts[:, None] + torch.arange(CONTEXT + 1, device=corpus.device)].long()


def random_windows(corpus: Tensor, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yield windows [B, CONTEXT + 1] without end, on the corpus's device."""
    generator = torch.Generator(corpus.device).manual_seed(seed)
    starts = torch.empty(batch_size, dtype=torch.long, device=corpus.device)
    while True:
        yield windows_at(corpus, starts.random_(0, len(corpus) - CONTEXT, generator=generator))


def all_windows(corpus: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Return all windows that do not overlap, in batches [B, CONTEXT + 1], the last maybe less."""
    starts = torch.arange(0, len(corpus) - CONTEXT, CONTEXT, device=corpus.device)
    return windows_at(corpus, starts).split(batch_size)
