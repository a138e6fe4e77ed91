"""Arguments of the ops that copy rows, for the CPU, the interpreter and CUDA."""

from __future__ import annotations

from itertools import product

import torch

INDICES = (torch.int32, torch.int64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool)
SHAPES = ((), (1,), (3,), (64,), (96,), (2304,), (2, 3, 4), (0,))
"""Shapes of a row: no dimension, widths that are no powers of two, several dimensions."""


def random(generator, shape, dtype, device):
    return torch.randint(0, 100, shape, generator=generator).to(dtype).to(device)


def gathers(device):
    """Yield sources and indices: no, one and several rows, and sources of any strides."""
    generator = torch.Generator().manual_seed(1)
    for dtype, shape, count in product(DTYPES, SHAPES, (0, 1, 3, 8)):
        index = torch.randint(0, 5, (count,), generator=generator).to(INDICES[count % 2])
        yield random(generator, (5, *shape), dtype, device), index.to(device)
    index = torch.tensor([4, 0, 4], device=device)
    yield random(generator, (96, 5), torch.bfloat16, device).t(), index
    yield random(generator, (5, 4, 40), torch.float32, device)[:, 1, ::2], index
    yield random(generator, (4, 3, 5), torch.float32, device).transpose(0, 2), index
    yield random(generator, (0, 7), torch.float32, device), index[:0]


def scatters(device):
    """Yield targets, sources and indices: one tensor or several of different rows."""
    generator = torch.Generator().manual_seed(2)
    several = [((dtype, shape),) for dtype, shape in product(DTYPES, SHAPES)]
    several += [
        ((torch.int64, (1,)), (torch.bfloat16, (2304,))),
        ((torch.float32, (4,)), (torch.int64, (4,)), (torch.float16, (96,)), (torch.bool, ())),
        (),
    ]
    for kinds, count in product(several, (0, 1, 3, 8)):
        index = torch.randperm(9, generator=generator)[:count].to(INDICES[count % 2]).to(device)
        targets = [random(generator, (9, *shape), dtype, device) for dtype, shape in kinds]
        sources = [random(generator, (count, *shape), dtype, device) for dtype, shape in kinds]
        yield targets, sources, index
    spaced = random(generator, (2, 6, 40), torch.float32, device)[:, ::2, ::2].flatten(0, 1)
    yield [torch.zeros(9, 20, device=device)], [spaced], torch.arange(6, device=device)
