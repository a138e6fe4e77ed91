"""Passes that compile the kernels of an engine run through, and leave no trace in its text."""

from __future__ import annotations

import logging
from functools import partial, wraps

import pytest
import torch
import triton
from triton.runtime._async_compile import active_mode

import graphkit as gk
from graphkit.engine.attention import TritonAttention
from graphkit.ops.kernel_requests import kernel_requests
from graphkit.ops.registration import OPS


class CompilingBackend(gk.RecorderBackend):
    compiles_kernels = True


class OpOnCpu:
    """An op that requests its kernels as on CUDA, and whose launches run the reference."""

    def __init__(self, op, stood_in):
        self.op, self.reference, self.stood_in = op, op.reference, stood_in

    def launch(self, args):
        is_requesting = kernel_requests.get().is_requesting
        return self.op.launch(args) if is_requesting else self.reference(*args)

    def stand_in(self, args):
        self.stood_in.append(self.op.name)
        has_own = self.op.is_costly or self.op.own_stand_in is not None
        return self.op.stand_in(args) if has_own else self.reference(*args)

    def __call__(self, *args):
        requests = kernel_requests.get()
        if requests is None:
            return self.reference(*args)
        return requests.run(self, self.op.arguments(*args))


@pytest.fixture
def stood_in(monkeypatch, tmp_path):
    """Let ops request kernels; return the names of those that torch computes meanwhile."""

    def warmup(kernel, *args, grid, **_options):
        del grid
        shapes = [arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args]
        key = f"{kernel.__name__} {shapes}"
        return active_mode.get().submit(key, object, lambda _kernel: None)

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.JITFunction, "warmup", warmup)
    names, before = [], {name: op.reference for name, op in OPS.items()}
    for op in OPS.values():
        # The dataclass is frozen: nothing else replaces a reference.
        object.__setattr__(op, "reference", wraps(op.reference)(partial(OpOnCpu(op, names))))
    yield names
    for name, reference in before.items():
        object.__setattr__(OPS[name], "reference", reference)


def text_of(backend, algorithm, options):
    engine = gk.models.reference_engine(
        algorithm,
        num_steps=3,
        device="cpu",
        backend=backend,
        attention=TritonAttention,
        max_batch_size=3,
        batch_sizes=[1, 3],
        **options,
    )
    with engine:
        engine.capture()
        requests = [
            engine.submit(
                [5, 6, 7, i], gk.SamplingParams(max_new_tokens=8, temperature=i % 2, seed=i)
            )
            for i in range(3)
        ]
        while not all(request.is_finished for request in requests):
            engine.step()
        return [request.output_ids for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("EAGLE", {"generation": "v3"}),
        ("EAGLE", {"generation": "v2", "topk": 2, "num_draft_tokens": 8}),
        ("DFLASH", {}),
        ("EAGLE3", {"quantize": "int4"}),
    ],
)
def test_an_engine_writes_the_same_text(stood_in, caplog, algorithm, options):
    expected = text_of(gk.RecorderBackend(), algorithm, options)
    assert not stood_in
    with caplog.at_level(logging.DEBUG, "graphkit"):
        assert text_of(CompilingBackend(), algorithm, options) == expected
    assert len({*stood_in}) > 10
    assert "Compiled " in caplog.text
    assert "that compiles kernels failed" not in caplog.text
    assert "waits for its kernels" not in caplog.text
