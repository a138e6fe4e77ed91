"""Steps with a collective inside, whose result shows which ranks ran how many rows."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

import graphkit as gk

VOCAB, WIDTH, LARGEST = 8, 2, 4
SPEC = gk.SpecConfig("EAGLE", num_steps=1, topk=1, num_draft_tokens=WIDTH)
SIZES = gk.BufferSizes(LARGEST, 64, 1, VOCAB, torch.float32)
RUNNERS = {1: gk.DecodeRunner, WIDTH: gk.TargetVerifyRunner}
"""Runners by rows per request."""


def rank_device():
    """Return the device of this rank: its GPU with NCCL, else the CPU."""
    is_cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if is_cuda else torch.device("cpu")


def rank_group(process_group=None, **options):
    """Return a group whose time limit ends a test that went wrong, but no slow one."""
    return gk.RankGroup(process_group, **({"time_limit": 120.0} | options))


def step(inputs, group=None):
    """Return token ids as logits, plus the rows of all ranks."""
    rows = torch.full((1,), float(inputs.num_tokens), device=inputs.input_ids.device)
    dist.all_reduce(rows, group=group)
    logits = inputs.input_ids[:, None] + torch.zeros_like(rows).expand(VOCAB) + rows
    return gk.ForwardOutput(next_token_logits=logits)


def runner(group, forward=step, *, width=WIDTH, **options):
    """Return a planned runner for sizes 1, 2 and 4."""
    settings = {
        "spec": SPEC,
        "sizes": SIZES,
        "batch_sizes": [1, 2, LARGEST],
        "device": rank_device(),
    }
    return RUNNERS[width](forward, group=group, **(settings | options))


def captured(group, forward=step, **options):
    """Return a captured runner."""
    made = runner(group, forward, **options)
    made.capture()
    return made


def batch(requests, *, width=WIDTH, mark=0, **fields):
    """Return a batch with token ids from ``mark`` on."""
    tokens = requests * width
    rows = {
        "req_pool_indices": np.arange(1, requests + 1),
        "seq_lens": np.full(requests, 5, dtype=np.int32),
        "input_ids": np.arange(tokens) + mark,
        "positions": np.arange(tokens),
        "out_cache_loc": np.arange(1, tokens + 1),
    }
    return gk.TargetVerifyInputs(**(rows | fields))


def check(output, requests, all_rows, *, width=WIDTH, mark=0):
    """Check the live rows of an output, and the rows that all ranks ran together."""
    expected = torch.arange(requests * width)[:, None] + mark + all_rows + torch.zeros(VOCAB)
    got = output.next_token_logits.cpu()
    assert torch.equal(got, expected), (
        f"got {got[:, 0].tolist()}, expected {expected[:, 0].tolist()}"
    )
