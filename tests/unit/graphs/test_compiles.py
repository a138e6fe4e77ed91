"""Compiles of Triton kernels after the first replay are noted, with kernel and shape."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace

import pytest

import graphkit as gk
from graphkit.graphs.compiles import CompileWatch

triton = pytest.importorskip("triton")


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
