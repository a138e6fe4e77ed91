"""Random numbers by seed, position and draw for CUDA. Contract: ``graphkit.ops.philox``."""

from typing import Any

import torch
import triton
import triton.language as tl

from graphkit.ops.kernels.launch import launch

BLOCK = 128


@triton.jit
def uniform(seed, position, draw):
    """Return the samples of one request at some draws, int32 [n]."""
    zero = tl.zeros_like(draw)
    w0, w1, w2, w3 = tl.philox(seed + zero, position + zero, draw // 4, zero, zero)
    lane = draw % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    return (word >> 8).to(tl.float32) * 2**-24


@triton.jit(do_not_specialize=["requests", "draws"])
def philox_uniform_kernel(samples, seeds, positions, requests, draws, BLOCK: tl.constexpr):
    """Four draws of one request per thread, BLOCK threads per program."""
    counters = (draws + 3) // 4
    thread = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    request = thread // counters
    counter = (thread % counters).to(tl.int32)
    is_request = request < requests
    seed = tl.load(seeds + request, mask=is_request, other=0)
    position = tl.load(positions + request, mask=is_request, other=0)
    zero = tl.zeros_like(counter)
    words = tl.philox(seed, position, counter, zero, zero)
    for lane in tl.static_range(4):
        draw = counter * 4 + lane
        sample = (words[lane] >> 8).to(tl.float32) * 2**-24
        tl.store(samples + request * draws + draw, sample, mask=is_request & (draw < draws))


def launch_philox_uniform(given: Any) -> torch.Tensor:
    """Launch ``philox_uniform``."""
    requests = given.seeds.numel()
    samples = torch.empty(requests, given.draws, dtype=torch.float32, device=given.seeds.device)
    threads = requests * triton.cdiv(given.draws, 4)
    launch(
        philox_uniform_kernel, (triton.cdiv(threads, BLOCK),), given, samples=samples,
        requests=requests, BLOCK=BLOCK,
    )  # fmt: skip
    return samples
