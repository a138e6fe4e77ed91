"""KV slots of keys, from a page table: what kernels over a paged cache share."""

import triton
import triton.language as tl


@triton.jit
def slots_of_keys(page, key, PAGE_SIZE: tl.constexpr):
    """Return the slots, int64, of keys in pages.

    Triton 3.6 takes the sum to be divisible by the page size at every key, and loads 16 bytes at
    once where rows of the cache are less aligned. ``multiple_of`` replaces what it derives.
    """
    return tl.multiple_of(page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE, 1)
