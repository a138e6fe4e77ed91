"""Block sizes, warps and splits of ``paged_attention``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import triton

MAX_SPLITS = 128
"""Most splits of the keys where splits are no segments."""
BLOCK_BYTES = 16384
"""Most bytes of a block of values. Keys and values of three stages then take 96 KiB, so that two
programs share the memory of a multiprocessor, 228 KiB on sm_90."""
LEAST_SPLIT = 128
"""Least keys of such a split, unless blocks of keys are large: joining has a cost."""
LEAST_SEGMENT = 256
"""Keys of the first segments, which programs share; see ``segment_at`` of the kernel."""
LARGE_KEYS = 128
"""Keys of a large block, for keys of up to 128 elements."""
PROMPT_ROWS = 512
"""Least query rows of a request for tiles of 128 rows, where heads are narrow. Fewer rows would
leave multiprocessors idle; the chunks of a prompt are limited by arithmetic."""
LARGE_BYTES = 200 * 1024
"""Least shared memory of a multiprocessor for large blocks of 16-bit elements. One program with
three stages of keys and values then takes 192 KiB."""


@dataclass(frozen=True)
class AttentionConfig:
    """How a launch of ``paged_attention`` divides its work.

    Attributes:
        block_rows: Query rows of a program, a power of two, at least 16.
        block_keys: Keys that a program loads at once, a power of two, at least 16.
        num_warps: Warps of a program.
        num_stages: Blocks of keys in flight in a program, the current one included.
        programs: Programs that a multiprocessor should get.
        least_split: Least keys of a split that is no segment.
    """

    block_rows: int
    block_keys: int
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 2
    least_split: int = LEAST_SPLIT


def choose_config(
    rows: int, key_dim: int, value_dim: int, element_size: int, is_shared: bool, shared_bytes: int
) -> AttentionConfig:
    """Return the configuration for tiles of up to ``rows`` query rows, which are row-invariant.

    The keys of a block decide the bits of a row: they do not depend on the number of rows. Latents,
    of more than 256 elements, leave a multiprocessor memory for one program with two large blocks
    in flight, and registers for the sums of 32 rows. Keys and values of that size that are apart
    take twice the memory. Blocks of float8 take half of it.

    Args:
        rows: Query rows of a request for one key-value head.
        key_dim: Head size of the keys.
        value_dim: Head size of the values.
        element_size: Bytes of a key's element; 1 if they are read as pairs.
        is_shared: Whether values are the first parts of their keys.
        shared_bytes: Bytes of shared memory of a multiprocessor.
    """
    is_wide = value_dim > 256
    block_rows = min(32 if is_wide else 64, max(16, triton.next_power_of_2(rows)))
    most_keys = _most_keys(value_dim, element_size)
    warps = 8 if is_wide or block_rows == 64 else 4
    if is_wide and element_size > 2:
        return AttentionConfig(block_rows=16, block_keys=16, num_stages=2, programs=1)
    if is_wide:
        keys = 64 if is_shared and key_dim <= 576 else 32
        return AttentionConfig(block_rows, keys, num_warps=warps, num_stages=2, programs=1)
    if element_size == 1:
        return AttentionConfig(block_rows, min(LARGE_KEYS, most_keys), num_warps=warps)
    if _has_large_blocks(key_dim, value_dim, element_size, is_shared, shared_bytes):
        block_rows = 128 if rows >= PROMPT_ROWS else block_rows
        stages = 2 if block_rows >= 64 else 3
        return AttentionConfig(block_rows, LARGE_KEYS, warps, stages, programs=1)
    return AttentionConfig(block_rows, min(64, most_keys), num_warps=warps)


def choose_fast_config(
    rows: int, key_dim: int, value_dim: int, element_size: int, is_shared: bool, shared_bytes: int
) -> AttentionConfig:
    """Return the fastest configuration for tiles of up to ``rows`` query rows.

    With 64 rows and more a program is limited by arithmetic: smaller blocks in flight are enough.
    Up to 32 rows of float8 take blocks of twice as many keys, more rows another stage. The
    arguments are those of ``choose_config``.
    """
    block_rows = min(64, max(16, triton.next_power_of_2(rows)))
    most_keys = _most_keys(value_dim, element_size)
    warps = 8 if block_rows == 64 else 4
    if value_dim > 256 and element_size > 2:
        return AttentionConfig(block_rows=16, block_keys=16, num_stages=2, programs=1)
    if value_dim > 256 and not is_shared:
        return AttentionConfig(block_rows, 32, num_warps=warps, num_stages=2, programs=1)
    if element_size == 1 and block_rows <= 32:
        return AttentionConfig(block_rows, min(LARGE_KEYS, most_keys))
    is_large = _has_large_blocks(key_dim, value_dim, element_size, is_shared, shared_bytes)
    if block_rows <= 32 and is_large:
        return AttentionConfig(block_rows, LARGE_KEYS, programs=1, least_split=2 * LARGE_KEYS)
    block_keys = min(64, most_keys)
    if rows >= PROMPT_ROWS and is_large:
        return AttentionConfig(128, block_keys, num_warps=8, programs=1)
    if element_size == 1:
        return AttentionConfig(block_rows, block_keys, num_stages=4)
    if value_dim <= 256:
        return AttentionConfig(block_rows, block_keys)
    if block_rows == 64 and key_dim <= 576:
        return AttentionConfig(block_rows, 64, num_warps=8, num_stages=2, programs=1)
    return AttentionConfig(block_rows, block_keys=32, num_warps=warps, programs=1)


def _most_keys(value_dim: int, element_size: int) -> int:
    """Return the keys of a block of ``BLOCK_BYTES`` of values."""
    padded: int = triton.next_power_of_2(value_dim)
    return max(16, BLOCK_BYTES // (max(16, padded) * element_size))


def _has_large_blocks(
    key_dim: int, value_dim: int, element_size: int, is_shared: bool, shared_bytes: int
) -> bool:
    """Return whether keys of 16 bits are few enough bytes for large blocks."""
    is_narrow = value_dim <= 128 >= key_dim and element_size == 2 and not is_shared
    return is_narrow and shared_bytes >= LARGE_BYTES


def spread_rows(config: AttentionConfig, programs: int, processors: int) -> AttentionConfig:
    """Return a configuration that spreads rows over twice as many programs, if all can run at once.

    Attention over a short context takes as long as one program, which is faster with fewer rows.
    Configurations without large blocks of keys are returned as they are.

    Args:
        config: A configuration.
        programs: Programs of the launch with that configuration.
        processors: Multiprocessors of the device.
    """
    if config.block_keys != LARGE_KEYS or config.block_rows <= 16 or 2 * programs > processors:
        return config
    return replace(config, block_rows=config.block_rows // 2)


def count_segments(keys: int) -> int:
    """Return the segments of so many keys; see ``segment_at`` of the kernel."""
    last = max(keys - 1, 0)
    level = max(last.bit_length() - 12, 0)
    return 8 * level + (last >> (8 + level)) + 1


@cache
def choose_splits(tiles: int, most: int, places: int) -> int:
    """Return the number of splits of the keys, from sizes that a capture fixes.

    It minimises the time of the programs, which run ``places`` at a time: a request's keys are
    divided evenly, so that time is the number of rounds over the splits. Each further split adds a
    hundredth, for joining.

    Args:
        tiles: Programs of one split.
        most: Most splits.
        places: Programs that the device runs at a time.
    """
    return min(
        range(1, max(1, most) + 1),
        key=lambda splits: -(-tiles * splits // places) / splits * (1 + 0.01 * splits),
    )
