"""Processes that are the ranks of a process group, and run scenarios one after the other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

PASSED, DIED, HUNG = "passed", "died", "hung"
_LIMIT = timedelta(seconds=120)
_EXIT_S = 20
_PRELOADED = (
    "torch._dynamo",  # takes a second, and torch imports it at the first ``torch.no_grad``
    "torch.distributed",
    "graphkit.audit",
    "graphkit.cli.benchmarks",
    "graphkit.cli",
    "graphkit.audit.runs.capture",
)


def die():
    """End this process as a crash does: without any cleanup."""
    os._exit(9)


def run_scenarios(scenarios, size, limit_s, backend="gloo"):
    """Run scenarios on ``size`` ranks; a scenario takes no arguments.

    On the CPU, processes are forked from a server that has imported torch once. The environment is
    that of torchrun. Scenarios have a process group each, unless their ``has_group`` is false. One
    that ends a process must be the last.

    Args:
        scenarios: Functions of modules.
        size: Number of ranks.
        limit_s: Time for all scenarios, after which the processes are killed.
        backend: ``gloo``, or ``nccl`` with a GPU per rank.

    Returns:
        The outcome of each rank by name of the scenario: ``PASSED``, ``DIED``, ``HUNG`` or a
        traceback.
    """
    # A forked process cannot use CUDA if its server has.
    context = multiprocessing.get_context("spawn" if backend == "nccl" else "forkserver")
    context.set_forkserver_preload([*_PRELOADED, *{each.__module__ for each in scenarios}])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(
            target=_serve, args=(rank, size, store.port, scenarios, pipes[rank][1], backend)
        )
        for rank in range(size)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    deadline = time.monotonic() + limit_s
    found = {each.__name__: [] for each in scenarios}
    for process, (receiver, _) in zip(processes, pipes, strict=True):
        for outcome in _received(receiver, scenarios, deadline):
            found[outcome[0]].append(outcome[1])
        process.join(_EXIT_S)  # compute-sanitizer reports its findings when a process exits
        process.kill()
        process.join()
    return found


def _received(receiver, scenarios, deadline):
    for number in range(len(scenarios)):
        ended = HUNG
        if receiver.poll(max(deadline - time.monotonic(), 0)):
            try:
                yield receiver.recv()
                continue
            except EOFError:
                ended = DIED
        yield from ((each.__name__, ended) for each in scenarios[number:])
        return


def _serve(rank, size, port, scenarios, sender, backend):
    gc.freeze()  # a collection would copy every page that the server and its processes share
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    for scenario in scenarios:
        name = scenario.__name__
        if getattr(scenario, "has_group", True):
            dist.init_process_group(
                backend, store=dist.PrefixStore(name, store), rank=rank, world_size=size,
                timeout=_LIMIT, device_id=device,
            )  # fmt: skip
        outcome = _outcome(scenario, rank)
        if backend == "nccl":
            gc.collect()  # NCCL waits for graphs that a traceback keeps alive
        if dist.is_initialized():
            ended = _outcome(dist.destroy_process_group, rank)
            outcome = ended if outcome == PASSED else outcome
        sender.send((name, outcome))


def _outcome(call, rank):
    try:
        call()
    except BaseException:
        return f"rank {rank}: {traceback.format_exc()}"
    return PASSED
