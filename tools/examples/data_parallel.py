"""Data-parallel attention with expert parallelism: ranks serve requests of their own.

Each rank attends to the KV cache of its requests and owns a part of the experts. Around the experts
the ranks gather the rows of all, and each takes the sum of what all experts computed for its rows.
Both collectives have a fixed size in a graph, so ranks replay the same padded size, and a rank
whose requests have ended replays pads until all have.

torchrun --nproc-per-node 2 tools/examples/data_parallel.py
"""

from __future__ import annotations

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention as attention, silu

import graphkit as gk
from graphkit.records import ReplayStats

LENGTHS = (24, 8, 20, 4, 6, 10, 28, 2, 16)
"""Tokens of each request. Rank r of n serves requests r, r + n, ...: each has other live sizes."""
CONTEXT, VOCAB, HIDDEN, LAYERS, EXPERTS, CHOSEN = 32, 64, 32, 2, 8, 2
SIZES = gk.BufferSizes(4, CONTEXT, HIDDEN, VOCAB, torch.float32)  # 5 requests run without a graph
SPEC = gk.SpecConfig("NGRAM", num_steps=1, topk=1, num_draft_tokens=2)


class Experts(nn.Module):
    """A mixture of experts whose experts are split over the ranks of a group, if there is one."""

    def __init__(self, group: gk.RankGroup | None) -> None:
        super().__init__()
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        self.group, self.own = group, slice(EXPERTS * rank // size, EXPERTS * (rank + 1) // size)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        up, down = torch.randn(2, EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5  # the same on all ranks
        self.up, self.down = nn.Parameter(up[self.own]), nn.Parameter(down[self.own])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the experts' part of a layer: [T, HIDDEN] to [T, HIDDEN]."""
        if self.group is None:
            return self.weighed(x)
        # A graph has as many rows on every rank. Afterwards this code runs only if the ranks agree
        # on a step without a graph, in which each rank has its live rows alone.
        agreed = self.group.agreed_size
        rows = len(x) if agreed is None else max(agreed.batch_sizes)
        mine = pad(x, (0, 0, 0, rows - len(x)))
        of_all, total = mine.new_empty(self.group.size, rows, HIDDEN), torch.empty_like(mine)
        dist.all_gather(list(of_all), mine, group=self.group.process_group)
        made = self.weighed(of_all.flatten(0, 1)).view_as(of_all)
        dist.reduce_scatter(total, list(made), group=self.group.process_group)
        return total[: len(x)]

    def weighed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of this rank's experts, each weighed by the router; static shapes."""
        scores, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        weights = torch.zeros(len(x), EXPERTS, device=x.device).scatter(1, chosen, scores)
        return torch.einsum("te,eth->th", weights[:, self.own], silu(x @ self.up) @ self.down)


class Model(nn.Module):
    """A decoder with a row of the KV cache per request; row 0 is for pads."""

    def __init__(self, group: gk.RankGroup | None) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(LAYERS))
        self.experts = nn.ModuleList(Experts(group) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("cache", torch.zeros(LAYERS, 2, len(LENGTHS) + 1, CONTEXT, HIDDEN))

    def forward(self, inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Return the logits of one token per request."""
        rows, positions = inputs.req_pool_indices, inputs.positions
        visible = torch.arange(CONTEXT, device=rows.device) <= positions[:, None, None]
        x = self.tokens(inputs.input_ids) + self.places(positions)
        for qkv, experts, (keys, values) in zip(self.qkv, self.experts, self.cache, strict=True):
            q, keys[rows, positions], values[rows, positions] = qkv(self.norm(x)).chunk(3, -1)
            x = x + attention(q[:, None], keys[rows], values[rows], visible)[:, 0]
            x = x + experts(self.norm(x))
        return gk.ForwardOutput(next_token_logits=self.head(self.norm(x)))


@torch.inference_mode()
def serve(
    group: gk.RankGroup | None, device: torch.device
) -> tuple[list[int], torch.Tensor, ReplayStats]:
    """Decode the requests of this rank; without a group, those of all.

    Returns:
        The requests, the logits of all steps [requests, steps, VOCAB], and the runner's counts.
    """
    torch.manual_seed(0)
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    requests, model = list(range(len(LENGTHS)))[rank::size], Model(group).to(device)
    tokens = torch.arange(len(LENGTHS))  # the next token of each request
    logits = torch.zeros(len(LENGTHS), CONTEXT, VOCAB)
    with gk.DecodeRunner(model, spec=SPEC, sizes=SIZES, device=device, group=group) as runner:
        runner.capture()
        for step in itertools.count():
            live = [request for request in requests if step < LENGTHS[request]]
            if live:
                rows, positions = torch.tensor(live) + 1, torch.full((len(live),), step)
                batch = gk.TargetVerifyInputs(
                    req_pool_indices=rows, seq_lens=positions.int(), input_ids=tokens[live],
                    positions=positions, out_cache_loc=rows * CONTEXT + step,
                )  # fmt: skip
                logits[live, step] = runner.run(batch).next_token_logits.cpu()
                tokens[live] = logits[live, step].argmax(-1)
            elif group is None or group.idle() is gk.ForwardMode.IDLE:  # all ranks are idle
                break
        return requests, logits[requests], runner.stats


def main() -> int:
    """Serve on all ranks, compare each rank's rows with those of one process, and print counts."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    group = gk.RankGroup()
    requests, served, stats = serve(group, device)
    _, expected, _ = serve(None, device)
    difference = float((served - expected[requests]).abs().max())
    print(
        f"rank {group.rank}: {len(requests)} requests, {stats.replays} replays, {stats.idle} idle "
        f"steps, {sum(stats.fallbacks.values())} eager, largest difference {difference:.1e}"
    )
    dist.destroy_process_group()
    return 0 if difference < 1e-4 else 1


if __name__ == "__main__":
    raise SystemExit(main())
