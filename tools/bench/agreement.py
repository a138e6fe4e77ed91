"""Time that ranks take to agree before a replay, and random steps with idle ranks.

One small step with an all-reduce inside. Its replays are timed with the ranks' agreement and
without (``same_batch``). Then ranks run random steps with unequal batches, some without requests,
and check every result.

    torchrun --nproc-per-node 2 tools/bench/agreement.py --out tools/bench/results/agreement.json
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from report_file import add_out, write_report
from rich.console import Console

import graphkit as gk
from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure
from graphkit.views import bench_view

WIDTH, LARGEST, VOCAB = 4, 8, 64
SPEC = gk.SpecConfig("EAGLE", num_steps=WIDTH - 1, topk=1, num_draft_tokens=WIDTH)
SIZES = gk.BufferSizes(LARGEST, 64, 1, VOCAB, torch.float32)
_CALLS = 200


def step(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
    """Return token ids as logits, plus the rows of all ranks."""
    rows = torch.full((1,), float(inputs.num_tokens), device=inputs.input_ids.device)
    dist.all_reduce(rows)
    return gk.ForwardOutput(next_token_logits=(inputs.input_ids[:, None] + rows).repeat(1, VOCAB))


def batch(requests: int, mark: int = 0) -> gk.TargetVerifyInputs:
    """Return a batch with token ids from ``mark`` on."""
    tokens = requests * WIDTH
    return gk.TargetVerifyInputs(
        req_pool_indices=np.arange(1, requests + 1),
        seq_lens=np.full(requests, 5, dtype=np.int32),
        input_ids=np.arange(tokens) + mark,
        positions=np.arange(tokens),
        out_cache_loc=np.arange(1, tokens + 1),
    )


def captured(group: gk.RankGroup) -> gk.TargetVerifyRunner:
    """Return a captured runner of the step."""
    runner = gk.TargetVerifyRunner(
        step, spec=SPEC, sizes=SIZES, batch_sizes=[1, 2, 4, LARGEST], group=group
    )
    runner.capture()
    return runner


def host_us(call: Callable[[], object], rounds: int) -> float:
    """Return the median microseconds of a call from an idle device."""
    times = []
    for _ in range(rounds * _CALLS):
        dist.barrier()
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return median(times)


def wrong_steps(runner: gk.TargetVerifyRunner, group: gk.RankGroup, steps: int) -> int:
    """Run random steps and return how many had a wrong result on this rank."""
    draw, wrong = random.Random(1), 0
    for mark in range(steps):
        sizes = [draw.choice([0, *range(LARGEST + 1)]) for _ in range(group.size)]
        mine = sizes[group.rank]
        if not mine:
            group.idle()
            continue
        got = runner.run(batch(mine, mark)).next_token_logits[:, 0]
        rows = runner.table.fit(max(sizes)) * WIDTH * group.size
        expected = torch.arange(mine * WIDTH, device=got.device) + mark + rows
        wrong += not torch.equal(got, expected.float())
    return wrong


def measured(group: gk.RankGroup, rounds: int, steps: int) -> BenchReport:
    """Measure on all ranks."""
    alone = captured(gk.RankGroup(same_batch=True))
    runner = captured(group)
    one = batch(LARGEST)
    without, with_vote = (host_us(lambda r=r: r.replay(one), rounds) for r in (alone, runner))
    wrong = torch.tensor([float(wrong_steps(runner, group, steps))], device=runner.device)
    dist.all_reduce(wrong)
    measures = (
        Measure(name="replay, same batch", value=without, unit="us"),
        Measure(name="replay, ranks agree", value=with_vote, unit="us"),
        Measure(name="agreement", value=with_vote - without, unit="us"),
        Measure(name="random steps", value=steps, unit="steps"),
        Measure(name="idle on rank 0", value=runner.stats.idle, unit="steps"),
        Measure(name="wrong results", value=wrong.item(), unit="steps", bar=0.0),
    )
    for each in (alone, runner):
        each.close()
    return BenchReport(
        name="agreement of ranks",
        environment=environment(runner.device),
        settings={"ranks": group.size, "rounds": rounds},
        measures=measures,
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, print on rank 0, and write to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_out(parser)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions (3)")
    parser.add_argument("--steps", type=int, default=10_000, help="random steps (10,000)")
    options = parser.parse_args(argv)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    group = gk.RankGroup()
    with torch.no_grad():
        report = measured(group, options.rounds, options.steps)
    if group.rank == 0:
        Console(width=120).print(bench_view(report))
        write_report(report, options.out)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
