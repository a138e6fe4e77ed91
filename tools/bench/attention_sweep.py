"""Launch configurations of ``paged_attention``: TB/s of cache read with each.

A table has a row per configuration and a column per number of programs that a multiprocessor gets,
from which ``choose_splits`` computes the splits of the keys. First all configurations run at 8k
context and batch 1 and 8. Then the fastest, and the default, run over contexts, batch sizes and
page sizes. Last, configurations for latents run at 8k context and batch 32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import geometric_mean

import torch
import triton
from attention_batch import DTYPE, GQA, MLA, Batch, Condition
from attention_timing import Calls

from graphkit.ops.kernels.attention_config import AttentionConfig, choose_config, choose_splits
from graphkit.records import Measure

BLOCKS, WARPS, STAGES, PROGRAMS = (32, 64, 128), (4, 8), (3, 4, 5), (1, 2, 3, 4, 6)
SHARED_BYTES = 227 * 1024
FIRST = [Condition(8192, batch, False, 16) for batch in (1, 8)]
THEN = [Condition(context, batch, False, 16) for context in (1024, 8192, 32768)
        for batch in (1, 8, 32)]  # fmt: skip
THEN += [Condition(8192, batch, False, 16) for batch in (2, 4, 16, 24, 64)]
THEN += [Condition(8192, batch, True, page_size) for page_size in (1, 64) for batch in (1, 8)]
LATENT = [
    Condition(8192, batch, False, 64, MLA, rows) for batch, rows in ((1, 1), (32, 1), (32, 4))
]
DEFAULT = choose_config(4 * GQA.heads // GQA.kv_heads, GQA.key_dim, GQA.key_dim, DTYPE.itemsize)
LATENT_CONFIGS = [
    AttentionConfig(rows, keys, warps, stages)
    for rows, keys, warps, stages in (
        (64, 32, 8, 3), (64, 32, 8, 2), (64, 64, 8, 2), (64, 16, 8, 4), (64, 32, 8, 4),
        (32, 32, 4, 3), (32, 32, 8, 3), (16, 32, 4, 3),
    )
]  # fmt: skip


def sweep(device: torch.device, rounds: int, note: Callable[[str], None]) -> Iterator[Measure]:
    """Measure on a CUDA device; yield what each table shows."""
    speeds: dict[AttentionConfig, list[float]] = defaultdict(list)
    candidates = [
        replace(DEFAULT, block_keys=block, num_warps=warps, num_stages=stages)
        for block, warps, stages in product(BLOCKS, WARPS, STAGES)
        # Keys and values of the blocks in flight.
        if 2 * block * GQA.key_dim * DTYPE.itemsize * (stages - 1) < SHARED_BYTES
    ]
    for condition in FIRST:
        for config, found in _table(condition, candidates, device, rounds):
            speeds[config].append(max(each.value for each in found))
            yield from found
        note(str(condition))
    tried = {config: geometric_mean(each) for config, each in speeds.items()}
    best = max(tried, key=tried.__getitem__)
    note(f"fastest: {_name(best)}")
    finalists = dict.fromkeys([best, DEFAULT])
    for condition in THEN:
        for _, found in _table(condition, finalists, device, rounds):
            yield from found
        note(str(condition))
    for condition in LATENT:
        for _, found in _table(condition, LATENT_CONFIGS, device, rounds):
            yield from found
        note(str(condition))


def _table(
    condition: Condition, configs: Iterable[AttentionConfig], device: torch.device, rounds: int
) -> Iterator[tuple[AttentionConfig, list[Measure]]]:
    """Yield the row of each configuration that the device can run."""
    batch = Batch(condition, device)
    for config in configs:
        try:
            found = list(_row(batch, config, rounds))
        except triton.runtime.errors.OutOfResources:
            continue
        yield config, found


def _row(batch: Batch, config: AttentionConfig, rounds: int) -> Iterator[Measure]:
    """Yield TB/s for each number of programs, measured once per number of splits."""
    condition, speeds = batch.condition, dict[int, float]()
    processors = torch.cuda.get_device_properties(batch.device).multi_processor_count
    shape = condition.shape
    rows = condition.rows * shape.heads // shape.kv_heads
    tiles = condition.batch_size * shape.kv_heads * -(-rows // config.block_rows)
    for programs in PROGRAMS:
        splits = choose_splits(tiles, condition.context, programs * processors)
        if splits not in speeds:
            act = partial(batch.launch, config=config, splits=splits)
            speeds[splits] = condition.cache_bytes / Calls(act, batch, rounds).us / 1e6
        yield Measure(
            name=f"{programs} per SM", value=speeds[splits], unit="TB/s",
            setting=str(condition), variant=_name(config),
        )  # fmt: skip


def _name(config: AttentionConfig) -> str:
    rows, keys = config.block_rows, config.block_keys
    return f"{rows} x {keys}, {config.num_warps} warps, {config.num_stages} stages"
