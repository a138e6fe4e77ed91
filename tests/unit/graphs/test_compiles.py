"""Triton kernels are compiled together before a capture, and noted after the first replay."""

from __future__ import annotations

import inspect
import logging
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

import graphkit as gk
from graphkit.graphs.compiles import CompileWatch, compile_ahead, observed_launches
from graphkit.ops.kernel_requests import KernelRequests, kernel_requests
from graphkit.ops.kernels.launch import launch


def compile_kernel(name="rms_norm", block=128):
    """Report a compile as Triton does."""
    jit = SimpleNamespace(arg_names=["x", "n", "BLOCK"])
    triton.knobs.runtime.jit_post_compile_hook(
        key="k",
        repr=f"{name}[num_warps=4](x: *fp32)",
        fn=SimpleNamespace(module="m", name=name, jit_function=jit),
        compile={
            "signature": {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"},
            "constants": {(2,): block},
        },
        is_manual_warmup=False,
        already_compiled=False,
    )


@pytest.fixture(autouse=True)
def own_hook(monkeypatch):
    called = []
    knob = triton.knobs.runtime
    monkeypatch.setattr(knob, "jit_post_compile_hook", lambda **facts: called.append(facts))
    return called


def test_a_compile_has_kernel_shape_and_line(own_hook, caplog):
    watch = CompileWatch()
    watch.start()
    with caplog.at_level(logging.WARNING):
        compile_kernel()
    (found,) = watch.compiles
    assert (found.kernel, found.shape) == ("rms_norm", "x: *fp32, n: i32, BLOCK = 128")
    assert "test_compiles.py" in found.source
    assert "`rms_norm` is compiled for x: *fp32" in caplog.text
    assert len(own_hook) == 1, "the hook of the program is called"


def test_compiles_before_start_and_after_stop_are_not_noted():
    watch = CompileWatch(lambda _found: None)
    compile_kernel()
    watch.start()
    watch.start()
    compile_kernel(block=64)
    watch.stop()
    compile_kernel()
    assert [found.shape[-2:] for found in watch.compiles] == ["64"]


@pytest.mark.slow
def test_an_engine_lists_compiles_after_its_capture():
    with gk.models.reference_engine(device="cpu", max_batch_size=2, batch_sizes=[2]) as engine:
        engine.capture()
        compile_kernel(block=256)
        assert engine.late_compiles == (
            "`rms_norm` is compiled for x: *fp32, n: i32, BLOCK = 256",
        )  # fmt: skip
    compile_kernel()
    assert len(engine.late_compiles) == 1


def test_many_watches_share_one_hook(monkeypatch):
    """An engine has a watch: the hooks of thousands would not fit on the stack."""
    depths = []

    def depth(**_facts):
        depths.append(len(inspect.stack(0)))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", depth)
    watches = [CompileWatch(lambda _found: None) for _ in range(3)]
    for watch in watches:
        watch.start()
        compile_kernel()
    assert len({*depths}) == 1
    assert [len(watch.compiles) for watch in watches] == [3, 2, 1]
    for watch in watches:
        watch.stop()


class Target:
    """Stands for a driver: kernels are compiled for an H200 and not launched."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@triton.jit
def add_kernel(x, count, AMOUNT: tl.constexpr):
    tl.store(x + count, tl.load(x + count) + AMOUNT)


class CountedKernel:
    """A kernel of Triton whose launches are counted."""

    arg_names = add_kernel.arg_names
    warmup = staticmethod(add_kernel.warmup)

    def __init__(self):
        self.launches = 0

    def __getitem__(self, _grid):
        def launched(*_args, **_options):
            self.launches += 1

        return launched


class AddArguments(NamedTuple):
    x: torch.Tensor
    count: int
    AMOUNT: int


class AddInPlace:
    """An op that adds to a tensor in place and returns what it added."""

    def __init__(self):
        self.kernel = CountedKernel()

    def launch(self, args):
        launch(self.kernel, (1,), args)
        return args.AMOUNT

    def stand_in(self, args):
        if args.AMOUNT < 0:
            raise torch.OutOfMemoryError
        args.x.add_(args.AMOUNT)
        return args.AMOUNT

    def __call__(self, x, amount):
        args = AddArguments(x, 2, amount)
        requests = kernel_requests.get()
        return self.launch(args) if requests is None else requests.run(self, args)


class CompilingBackend(gk.RecorderBackend):
    compiles_kernels = True


@pytest.fixture
def op(monkeypatch, tmp_path):
    """Return an op none of whose kernels are compiled."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", Target())
    add_kernel.device_caches.clear()
    yield AddInPlace()
    add_kernel.device_caches.clear()


def test_kernels_of_a_pass_are_compiled_together_and_not_launched(op):
    x, watch = torch.zeros(4), CompileWatch()
    watch.start()

    def forward():
        for amount in (1, 2, 3, 2):
            op(x, amount)

    assert compile_ahead(CompilingBackend(), [forward]) == [forward]
    watch.stop()
    assert op.kernel.launches == 0
    assert x.tolist() == [8.0] * 4, "torch computes each op once"
    assert not watch.compiles, "nothing waits for these while it serves"
    kernels = add_kernel.device_caches[0][0]
    assert {type(kernel) for kernel in kernels.values()} == {triton.compiler.CompiledKernel}
    assert len(kernels) == 3
    op(x, 1)
    assert op.kernel.launches == 1


def test_compiled_kernels_are_launched_and_further_functions_left_out(op):
    x, runs = torch.zeros(1), []

    def forward(amount):
        runs.append(amount)
        op(x, amount)

    forwards = [partial(forward, 1), partial(forward, 2)]
    assert compile_ahead(CompilingBackend(), forwards) == forwards[:1]
    add_kernel.device_caches.clear()  # as in another process: the disk has them
    assert compile_ahead(CompilingBackend(), forwards) == forwards[1:]
    assert (runs, op.kernel.launches) == ([1, 2, 1], 1)


def test_an_op_that_torch_cannot_compute_waits_for_its_kernels(op):
    x = torch.zeros(1)
    compile_ahead(CompilingBackend(), [lambda: op(x, -1)])
    assert op.kernel.launches == 1


def test_an_op_over_two_devices_is_launched(op):
    x = torch.zeros(1)
    requests = KernelRequests(lambda *_: False)
    requests.run(op, AddArguments(x, torch.empty(1, device="meta"), 1))
    assert (op.kernel.launches, x.tolist()) == (1, [0.0])


def test_torch_computes_an_op_on_the_device_of_its_tensors(op, monkeypatch):
    """A reference may create tensors without naming a device."""
    monkeypatch.setattr(op, "stand_in", lambda args: args.x + torch.ones(1))
    x = torch.empty(1, device="meta")
    with KernelRequests(lambda *_: False).collected():
        result = op(x, 1)
    assert (op.kernel.launches, result.device.type) == (0, "meta")


def test_a_pass_that_fails_leaves_the_rest_to_the_warm_ups(op):
    x, later = torch.zeros(1), []

    def forward():
        op(x, 1)
        raise RuntimeError("on the host")

    functions = [forward, lambda: later.append(1)]
    assert compile_ahead(CompilingBackend(), functions) == functions
    functions = [partial(op, x, 2), partial(op, x, 3), *functions]
    assert compile_ahead(CompilingBackend(), functions) == [functions[0], *functions[2:]]
    assert not later
    op(x, 1)
    assert op.kernel.launches == 2, "no requests remain"


def test_nothing_runs_ahead_where_there_are_no_kernels():
    assert compile_ahead(gk.RecorderBackend(), [pytest.fail]) == [pytest.fail]


def runner_of(op, x):
    """Return a runner of three sizes whose forward runs an op, and the sizes of its runs."""
    backend, runs = CompilingBackend(), []
    backend.warm_ups = 2

    def forward(inputs):
        runs.append(inputs.batch_size)
        op(x, inputs.batch_size)
        return gk.ForwardOutput(next_token_logits=torch.zeros(inputs.batch_size, 8))

    runner = gk.DecodeRunner(
        forward,
        spec=gk.SpecConfig("NONE", num_steps=0, topk=1, num_draft_tokens=1),
        sizes=gk.BufferSizes(
            max_batch_size=4, max_context_len=8, vocab_size=8, hidden_size=4, dtype=torch.float32
        ),
        batch_sizes=[1, 3, 4],
        backend=backend,
        mutable_state={"x": x},
    )
    return runner, runs


def test_a_capture_compiles_kernels_before_the_first_warm_up(op):
    x = torch.zeros(1)
    runner, runs = runner_of(op, x)
    runner.capture()
    compiled, captured = [4, 1], [4, 4, 4, 3, 3, 1, 1]
    assert runs == compiled + captured
    assert op.kernel.launches == len(captured)
    assert x.tolist() == [0.0], "mutable state is restored"


def test_a_pass_that_compiles_nothing_is_a_warm_up(op):
    compile_ahead(CompilingBackend(), [lambda: [op(torch.zeros(1), size) for size in (1, 3, 4)]])
    runner, runs = runner_of(op, torch.zeros(1))
    runner.capture()
    assert runs == [4, 4, 4, 3, 3, 1, 1]


def test_blocks_that_observe_launches_may_overlap(monkeypatch):
    jit, seen = triton.runtime.jit.JITFunction, []

    def run(self, *args, grid, warmup, **kwargs):
        return len(args)

    monkeypatch.setattr(jit, "run", run)
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="scale"), arg_names=["x", "n"])

    def note(kernel, arguments):
        seen.append((kernel, arguments))
        raise ValueError("the program must not see it")

    first, second = observed_launches(note), observed_launches(note)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert jit.run(kernel, 1, grid=(4,), warmup=False, n=2) == 1
    assert jit.run(kernel, 1, grid=(4,), warmup=True, n=2) == 1
    second.__exit__(None, None, None)
    assert seen == [("scale", {"x": 1, "n": 2, "grid": (4,)})]
    assert jit.run is run
