"""Failures of one rank in each phase, and the processes that run them; see ``rank_failures``."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized

import numpy as np
import torch
import torch.distributed as dist
from table_model import Table, TableForward

import graphkit as gk

LIMIT_S, LATE_S = 10.0, 18.0
"""Time limit of the groups, and how long a late rank sleeps."""
_FAILING_RANK = 1
_CONTEXT, _VOCAB = 64, 64
SPEC = gk.SpecConfig("EAGLE", num_steps=1, topk=1, num_draft_tokens=2)
SIZES = gk.BufferSizes(2, _CONTEXT, 1, _VOCAB, torch.float32)
Point = Callable[[], None]
_PRELOADED = [
    "torch._dynamo", "torch.distributed", "rich.console", "graphkit.engine", "graphkit.runners",
    "graphkit.distributed",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A failure of one rank.

    Attributes:
        phase: What all ranks do meanwhile.
        fault: What the rank does.
        words: What the errors of all other ranks contain.
    """

    phase: str
    fault: str
    words: str

    @property
    def failing_rank(self) -> int:
        """The rank that fails."""
        return 0 if self.fault == "host of the store killed" else _FAILING_RANK

    @property
    def name(self) -> str:
        """Phase and fault."""
        return f"{self.phase}: {self.fault}"

    def problems(self, endings: Sequence[Ending]) -> list[str]:
        """Return the errors of ranks that do not end, or do not name the failure."""
        return [
            f"rank {rank}: {each.text}"
            for rank, each in enumerate(endings)
            if not each.has_ended or (rank != self.failing_rank and not each.names(self.words))
        ]


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        seconds: Time from the fault to the end of the call; of a killed rank 0.
        has_ended: Whether its process ended by itself.
        text: Type and text of its error; ``passed`` without one, ``killed`` or ``hung``.
    """

    seconds: float
    has_ended: bool
    text: str

    def names(self, words: str) -> bool:
        """Return whether it ended with an error of graphkit that contains words."""
        return self.text.startswith(("RankError", "CaptureError")) and words in self.text


def _device() -> torch.device:
    """Return the device of this rank: its GPU with NCCL, else the CPU."""
    is_cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if is_cuda else torch.device("cpu")


def _read(output: gk.ForwardOutput) -> None:
    """Wait for the device, as programs do that read tokens."""
    output.next_token_logits.cpu()


def _shared(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
    """Return token ids as logits, plus the rows of all ranks."""
    rows = torch.full((1,), float(inputs.num_tokens), device=inputs.input_ids.device)
    dist.all_reduce(rows)
    return gk.ForwardOutput(next_token_logits=(inputs.input_ids[:, None] + rows).repeat(1, _VOCAB))


def _batch(requests: int = 1, **fields: object) -> gk.TargetVerifyInputs:
    tokens = 2 * requests
    rows: dict[str, object] = {
        "req_pool_indices": np.arange(1, requests + 1),
        "seq_lens": np.full(requests, 5, dtype=np.int32),
        "input_ids": np.arange(tokens),
        "positions": np.arange(tokens),
        "out_cache_loc": np.arange(1, tokens + 1),
    }
    return gk.TargetVerifyInputs(**(rows | fields))  # type: ignore[arg-type]


def _runner(
    forward: Callable[..., object] = _shared, *, same_batch: bool = False
) -> gk.TargetVerifyRunner:
    group = gk.RankGroup(time_limit=LIMIT_S, same_batch=same_batch)
    return gk.TargetVerifyRunner(
        forward, spec=SPEC, sizes=SIZES, batch_sizes=[1, 2], device=_device(), group=group
    )


def capture(point: Point) -> None:
    """Capture a forward that fails before its collective."""

    def forward(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        if inputs.batch_size == 1:
            point()
        return _shared(inputs)

    _runner(forward).capture()


def after_collectives(point: Point) -> None:
    """Capture a forward that fails after its collective."""

    def forward(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        output = _shared(inputs)
        if inputs.batch_size == 1:
            point()
        return output

    _runner(forward).capture()


def agreement(point: Point) -> None:
    """Fail between two replays of ranks that agree."""
    with _runner() as runner:
        runner.capture()
        runner.run(_batch())
        point()
        runner.run(_batch())


def _observed(runner: gk.TargetVerifyRunner, point: Point) -> None:
    with runner:
        runner.capture()
        _read(runner.replay(_batch()))
        with runner.observe(lambda launch: (point(), launch())[1]):
            _read(runner.replay(_batch()))


def replay(point: Point) -> None:
    """Fail between the agreement and the launch."""
    _observed(_runner(), point)


def same_batch(point: Point) -> None:
    """Fail before a launch that needs no agreement."""
    _observed(_runner(same_batch=True), point)


def eager(point: Point) -> None:
    """Fail in a forward without a graph, before its collective."""
    calls = []

    def forward(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        calls.append(0)
        if len(calls) == 2:
            point()
        return _shared(inputs)

    runner = _runner(forward)
    for _ in range(3):
        _read(runner.run(_batch()))


def close(point: Point) -> None:
    """Fail before the runner is closed."""
    runner = _runner()
    runner.capture()
    runner.run(_batch())
    point()
    runner.close()


# Batches that one rank refuses.


def bad_replay(point: Point) -> None:
    """Replay a batch that one rank refuses."""
    with _runner() as runner:
        runner.capture()
        runner.replay(_bad_batch(point))


def bad_staged(point: Point) -> None:
    """Replay a staged batch to which one rank does not assign a field."""

    def forward(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        return _shared(inputs)

    group = gk.RankGroup(time_limit=LIMIT_S)
    with gk.DraftExtendRunner(
        lambda inputs: gk.DraftExtendOutput(
            next_token_logits=forward(inputs).next_token_logits[-inputs.batch_size :]
        ),
        spec=SPEC, sizes=SIZES, batch_sizes=[1], device="cpu", group=group,
    ) as runner:  # fmt: skip
        runner.capture()
        staged = runner.stage(1)
        staged.num_accepted_tokens[:] = staged.extend_seq_lens[:] = 2
        staged.num_accepted_drafts[:] = 1
        with suppress(_OtherInput):
            point()
            staged.hidden_states = torch.zeros(2, 1)
        staged.replay()


def bad_eager(point: Point) -> None:
    """Run a batch that one rank refuses, before the capture."""
    _runner().run(_bad_batch(point))


def bad_large(point: Point) -> None:
    """Run a batch that is too large for the graphs and that one rank refuses."""
    with _runner() as runner:
        runner.capture()
        runner.run(_bad_batch(point, 3))


def bad_same_batch(point: Point) -> None:
    """Replay a batch that one rank refuses, without an agreement."""
    with _runner(same_batch=True) as runner:
        runner.capture()
        runner.replay(_bad_batch(point))


def ignored(point: Point) -> None:
    """Replay a batch that one rank refuses, and ignore the error on that rank."""
    runner = _runner(same_batch=True)
    runner.capture()
    try:
        runner.replay(_bad_batch(point))
    except gk.InputError:
        time.sleep(LATE_S)


def _bad_batch(point: Point, requests: int = 1) -> gk.TargetVerifyInputs:
    try:
        point()
    except _OtherInput:
        return _batch(requests, positions=np.zeros(9, dtype=np.int64))
    return _batch(requests)


def idle(point: Point) -> None:
    """Call ``idle`` on a rank that has dropped the runner of the others."""
    runner: gk.TargetVerifyRunner | None = _runner()
    assert runner is not None
    assert runner.group is not None
    runner.capture()
    group = runner.group
    runner.run(_batch())
    try:
        point()
    except _OtherInput:
        runner = None
    if runner is None:
        group.idle()
    else:
        runner.run(_batch())


# Engines.


def _engine(forward: Callable[..., object], generation: str | None) -> gk.SpeculativeEngine:
    requests = gk.ReqToTokenPool(1, _CONTEXT, _device())
    pool = gk.MHATokenToKVPool(_CONTEXT, 1, torch.float32, 1, 1, 1, _device())
    model = gk.EngineModel(forward, gk.SdpaAttention(requests, pool))
    return gk.SpeculativeEngine(
        model, spec=gk.SpecConfig("NONE", 0, 1, 1), sizes=replace(SIZES, max_batch_size=1),
        device=_device(),
        generation=generation,  # type: ignore[arg-type]
        group=gk.RankGroup(time_limit=LIMIT_S, same_batch=True),
    )  # fmt: skip


def _generate(
    at: int, point: Point, *, generation: str | None = None, captures: bool = False, tokens: int = 8
) -> None:
    """Generate on rank 0, follow on the others, and fail in a call of the forward."""
    table, calls = TableForward(Table(_device())), [-1000]

    def forward(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        calls[0] += 1
        if calls[0] == at:
            point()
        output = table(inputs)
        dist.all_reduce(output.next_token_logits.div_(dist.get_world_size()))
        return output

    with _engine(forward, generation) as engine:
        if captures:
            engine.capture()
        calls[0] = 0
        if dist.get_rank():
            engine.worker_loop()
        else:
            engine.generate([[1, 2, 3]], gk.SamplingParams(max_new_tokens=tokens))


def prefill(point: Point) -> None:
    """Fail in the forward of a prefill."""
    _generate(1, point)


def engine_step(point: Point) -> None:
    """Fail in the forward of a step."""
    _generate(3, point)


def engine_v3(point: Point) -> None:
    """Fail in a prefill of a captured engine, after which loops would run."""
    _generate(1, point, generation="v3", captures=True)


def weights(point: Point) -> None:
    """Generate 10 tokens with other weights on one rank."""
    shift = 0
    try:
        point()
    except _OtherInput:
        shift = 1
    table = TableForward(Table(_device()))

    def forward(inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        return gk.ForwardOutput(next_token_logits=table(inputs).next_token_logits.roll(shift, 1))

    with _engine(forward, None) as engine:
        engine.capture()
        if dist.get_rank():
            engine.worker_loop()
        else:
            engine.generate([[1, 2, 3]], gk.SamplingParams(max_new_tokens=10))


def _between_requests(point: Point, *, closes: bool) -> None:
    table = TableForward(Table(_device()))
    engine = _engine(table, "v3")
    engine.capture()
    if dist.get_rank() and not closes:
        with engine:
            point()
            engine.worker_loop()
        return
    try:
        engine.submit([1, 2, 3], gk.SamplingParams(max_new_tokens=40))
        engine.step()
        point()
        if not closes:
            time.sleep(1.0)
            engine.generate([[1, 2, 3]], gk.SamplingParams(max_new_tokens=8))
    finally:
        try:
            engine.close()
        finally:
            assert all(runner.status == "closed" for runner in engine.runners), "still captured"


def follow(point: Point) -> None:
    """Fail while rank 0 has no work, before ``worker_loop``."""
    _between_requests(point, closes=False)


def engine_close(point: Point) -> None:
    """Fail before the engine is closed; all ranks make the same calls."""
    _between_requests(point, closes=True)


class _OtherInput(Exception):  # noqa: N818 - no error
    """Raised on the rank that fails, which then passes another input than the others."""


def _late_interrupt() -> None:
    """Send SIGINT to this process while it waits."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()


PHASES: dict[str, Callable[[Point], None]] = {
    "capture": capture,
    "capture, after its collectives": after_collectives,
    "agreement": agreement,
    "replay": replay,
    "replay, same_batch": same_batch,
    "eager": eager,
    "close": close,
    "prefill": prefill,
    "engine step": engine_step,
    "engine, v3": engine_v3,
    "engine, follow": follow,
    "engine, close": engine_close,
    "replay of a bad batch": bad_replay,
    "replay of a bad staged batch": bad_staged,
    "eager run of a bad batch": bad_eager,
    "run of a bad batch that is too large": bad_large,
    "replay of a bad batch, same_batch": bad_same_batch,
    "replay of a bad batch, same_batch, ignored": ignored,
    "idle": idle,
    "engine, 10 tokens": weights,
}
_ENDED = "rank 1 ended"
_COMMON = {
    "exception": "rank 1 left the group after ValueError: no memory left",
    "^C": "rank 1 left the group after KeyboardInterrupt",
    "killed": _ENDED,
    "late": f"rank 1 did not arrive within {LIMIT_S:g} s",
    "host of the store killed": "rank 0 ended: the process that hosts the store",
}
_CAPTURES = {
    "exception": "ValueError: no memory left",
    "^C": "KeyboardInterrupt",
}
CASES = (
    *(Case("capture", fault, words) for fault, words in (_COMMON | _CAPTURES).items()),
    Case("capture, after its collectives", "exception", "ValueError: no memory left"),
    Case("capture, after its collectives", "killed", _ENDED),
    *(
        Case(phase, fault, words)
        for phase in ("agreement", "replay", "replay, same_batch", "eager", "prefill")
        for fault, words in _COMMON.items()
    ),
    Case("agreement", "^C while it waits", _COMMON["^C"]),
    Case("close", "killed", _ENDED),
    Case("close", "late", _COMMON["late"]),
    Case("close", "host of the store killed", _COMMON["host of the store killed"]),
    *(Case("engine step", fault, words) for fault, words in _COMMON.items()),
    Case("engine, v3", "exception", _COMMON["exception"]),
    Case("engine, v3", "killed", _ENDED),
    Case("engine, follow", "exception", _COMMON["exception"]),
    Case("engine, follow", "^C while it waits", _COMMON["^C"]),
    Case("engine, follow", "killed", _ENDED),
    Case("engine, close", "killed", _ENDED),
    Case("engine, close", "host of the store killed", _COMMON["host of the store killed"]),
    *(
        Case(phase, "other input", "rank 1 refused its batch: InputError: field 'positions'")
        for phase in (
            "replay of a bad batch", "eager run of a bad batch",
            "run of a bad batch that is too large",
        )
    ),
    Case(
        "replay of a bad batch, same_batch", "other input",
        "rank 1 left the group after InputError: field 'positions'",
    ),
    Case(
        "replay of a bad batch, same_batch, ignored", "other input",
        "rank 1 refused its batch: InputError: field 'positions'",
    ),
    Case(
        "replay of a bad staged batch", "other input",
        "rank 1 refused its batch: InputError: field 'hidden_states'",
    ),
    Case("idle", "dropped runner", "rank 1 has dropped its runner 0 of TARGET_VERIFY"),
    Case("engine, 10 tokens", "other weights", "rank 1 generated other tokens than rank 0"),
)  # fmt: skip


def _act(fault: str) -> None:
    """Fail in one of the ways of ``Case.fault``."""
    if fault == "exception":
        raise ValueError("no memory left")
    if fault == "^C":
        raise KeyboardInterrupt
    if fault == "^C while it waits":
        _late_interrupt()
    elif fault in ("killed", "host of the store killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "late":
        time.sleep(LATE_S)
    else:
        raise _OtherInput


def run_case(
    case: Case,
    size: int,
    limit_s: float = 120.0,
    busy: AbstractContextManager[object] | None = None,
    backend: str = "gloo",
) -> list[Ending]:
    """Run a case on processes, and return how each rank ended.

    Args:
        case: What goes wrong.
        size: Number of ranks.
        limit_s: Time after the start of the processes at which they are killed.
        busy: Entered until the fault, after which the processes mostly wait.
        backend: ``gloo``, or ``nccl`` with a GPU per rank.
    """
    # A forked process cannot use CUDA if its server has.
    context = multiprocessing.get_context("spawn" if backend == "nccl" else "forkserver")
    context.set_forkserver_preload(_PRELOADED)
    store, port = None, context.Value("i", 0)
    if case.failing_rank:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.value = store.port
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    faulted = context.Value("d", 0.0)
    processes = [
        context.Process(
            target=_serve, args=(case, rank, size, port, pipes[rank][1], faulted, backend)
        )
        for rank in range(size)
    ]
    with busy or nullcontext():
        deadline = time.monotonic() + limit_s
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        while (
            not faulted.value
            and any(process.is_alive() for process in processes)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
    endings = [
        _ending(process, receiver, faulted.value)
        for process, (receiver, _) in zip(processes, pipes, strict=True)
    ]
    del store
    return endings


def _ending(
    process: multiprocessing.process.BaseProcess, receiver: Connection, start: float
) -> Ending:
    has_ended = not process.is_alive()
    ended, text = start, "killed" if has_ended else "hung"
    with suppress(EOFError):
        if receiver.poll():
            ended, text = json.loads(receiver.recv())
    process.kill()
    process.join()
    return Ending(round(ended - start, 2), has_ended, text)


def _serve(
    case: Case,
    rank: int,
    size: int,
    port: Synchronized[int],
    sender: Connection,
    faulted: object,
    backend: str,
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    if rank == 0 and case.failing_rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.value = store.port
    else:
        while not port.value:
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", port.value, is_master=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100),
        device_id=device,
    )  # fmt: skip

    def point() -> None:
        if rank == case.failing_rank:
            faulted.value = time.time()  # type: ignore[attr-defined]
            _act(case.fault)
        elif case.fault == "^C while it waits" and case.phase == "agreement":
            time.sleep(2.0)

    text = "passed"
    with _without_stderr():
        try:
            PHASES[case.phase](point)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        sender.send(json.dumps([time.time(), text]))


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop warnings of torch about connections, which are what these cases are about."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
