"""Launch configurations of ``paged_attention``: TB/s of cache read with each.

A table has a row per configuration and a column per number of programs that a multiprocessor gets,
from which ``choose_splits`` computes the splits of the keys. First all configurations run at 8k
context and batch 1 and 8. Then the fastest, and the default, run over contexts, batch sizes and
page sizes. Last, configurations for latents run at 8k context and batch 32.

``sweep_float8`` has one table of microseconds over float8_e4m3fn at 8k context: the five fastest
configurations, the default, and the default over bfloat16.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import geometric_mean

import torch
import triton
from attention_batch import DTYPE, FP8, GQA, MLA, Batch, Condition, Shape
from attention_timing import Calls

from graphkit.ops.kernels.attention_config import (
    MAX_SPLITS,
    AttentionConfig,
    choose_fast_config,
    choose_splits,
)
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
ROWS = 4 * GQA.heads // GQA.kv_heads
DEFAULT = choose_fast_config(
    ROWS, GQA.key_dim, GQA.key_dim, DTYPE.itemsize, is_shared=False, shared_bytes=SHARED_BYTES
)
FLOAT8_DEFAULT = choose_fast_config(
    ROWS, FP8.key_dim, FP8.key_dim, FP8.dtype.itemsize, is_shared=False, shared_bytes=SHARED_BYTES
)
FLOAT8_SECONDS = 35
"""Time after which ``sweep_float8`` compiles no more configurations."""
FLOAT8_BATCHES = (8, 1, 32)
"""The first has all configurations, the others the ten fastest."""
FLOAT8_CONFIGS = [
    replace(FLOAT8_DEFAULT, block_keys=keys, num_warps=warps, num_stages=stages)
    for stages in (4, 3, 6)
    for keys, warps in ((64, 4), (128, 4), (128, 8), (32, 4), (64, 8))
]
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


def sweep_float8(
    device: torch.device, rounds: int, note: Callable[[str], None]
) -> Iterator[Measure]:
    """Measure on a CUDA device in less than a minute; yield one table, the fastest first."""
    began = time.perf_counter()
    times: dict[AttentionConfig, dict[int, float]] = defaultdict(dict)
    narrow = {size: Batch(_chain(size, FP8), device) for size in FLOAT8_BATCHES}
    first, *others = FLOAT8_BATCHES
    for config in FLOAT8_CONFIGS:
        if time.perf_counter() - began > FLOAT8_SECONDS:
            note(f"no time for {_name(config)}")
            continue
        for programs in (2, 3, 4, 6):
            _time(times, replace(config, programs=programs), narrow[first], rounds)
    note(f"batch {first}, {len(times)} configurations")
    ten = sorted(times, key=lambda config: times[config][first])[:10]
    for size in others:
        for config in dict.fromkeys([*ten, FLOAT8_DEFAULT]):
            _time(times, config, narrow[size], rounds)
        note(f"batch {size}")
    best = sorted(ten, key=lambda config: geometric_mean(times[config].values()))[:5]
    rows = {f"{_name(config)}, {config.programs} per SM": times[config] for config in best}
    default = f"default: {_name(FLOAT8_DEFAULT)}, {FLOAT8_DEFAULT.programs} per SM"
    rows[default] = times[FLOAT8_DEFAULT]
    wide: dict[AttentionConfig, dict[int, float]] = defaultdict(dict)
    for size in FLOAT8_BATCHES:
        _time(wide, DEFAULT, Batch(_chain(size, GQA), device), rounds)
    rows["default over bfloat16"] = wide[DEFAULT]
    for name, row in rows.items():
        for size in sorted(row):
            yield Measure(
                name=f"batch {size}", value=row[size], unit="us",
                setting="FP8, 8k context, chain, page size 16", variant=name,
            )  # fmt: skip


def _chain(batch_size: int, shape: Shape) -> Condition:
    return Condition(8192, batch_size, False, 16, shape)


def _time(
    times: dict[AttentionConfig, dict[int, float]],
    config: AttentionConfig,
    batch: Batch,
    rounds: int,
) -> None:
    """Add the microseconds per call with a configuration, if the device can run it."""
    try:
        act = partial(batch.launch, config=config, splits=None)
        times[config][batch.condition.batch_size] = Calls(act, batch, rounds).us
    except triton.runtime.errors.OutOfResources:
        times.pop(config, None)


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
        most = min(condition.context // config.least_split, MAX_SPLITS)
        splits = choose_splits(tiles, most, programs * processors)
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
