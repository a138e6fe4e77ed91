"""The launchers of steps and loops against their models; ``test_interpreted.py`` runs this file."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from graphkit.ops.device_loop import advance_loop, begin_loop, end_signals
from graphkit.ops.draft_length import choose_body
from graphkit.ops.kernels import device_loop
from graphkit.ops.registration import OPS
from graphkit.ops.step_state import finish_step
from graphkit.ops.stored_tokens import store_tokens

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"

CASES = runpy.run_path(str(Path(__file__).with_name("loop_cases.py")))
LENGTHS = runpy.run_path(str(Path(__file__).with_name("length_cases.py")))


def launcher(op):
    """Return a function that launches the op's kernel on the CPU."""
    op = OPS[op.__name__]
    return lambda *args: op.launch(op.arguments(*args))


@triton.jit
def store(address, value):
    """Store without the instruction that the interpreter cannot run."""
    tl.store(address, value)


@pytest.mark.parametrize("longest", [1, 3, 4])
@pytest.mark.parametrize("requests", [0, 1, 6])
def test_ends_of_steps(requests, longest):
    for seed in range(3):
        args = CASES["finish_case"](
            requests, seed=seed, longest=longest, width=longest + seed, stops=(1, 3, 16)[seed]
        )
        want = CASES["finished"](*args)
        report = launcher(finish_step)(*args)
        assert (report.tolist(), *(each.tolist() for each in args[4:7])) == want


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")  # of unused lanes
@pytest.mark.parametrize("requests", [0, 6])
def test_counts_and_log_probabilities(requests):
    for seed in range(4):
        args = CASES["scored_case"](requests, seed, longest=1 + seed)
        want = CASES["scored"](args)
        CASES["assert_scored"](launcher(finish_step)(*args), args, want)


def test_draft_lengths():
    for seed in range(40):
        case = LENGTHS["length_case"](seed)
        counts, body = LENGTHS["chosen_body"](case)
        launcher(choose_body)(*case.values())
        torch.testing.assert_close(case["acceptance"], torch.tensor(counts))
        assert body in (None, case["body"].item()), seed


def test_stored_tokens():
    for seed in range(6):
        args, want = (LENGTHS["stored_case"](seed) for _ in range(2))
        OPS["store_tokens"].reference(*want)
        launcher(store_tokens)(*args)
        for got, expected in zip(args, want, strict=True):
            is_tensor = torch.is_tensor(got)
            assert torch.equal(got, expected) if is_tensor else got == expected


@pytest.mark.skipif(
    triton.__version__ < "3.7", reason="triton 3.6 with numpy 2.4 cannot interpret such a loop"
)
def test_loops(monkeypatch):
    monkeypatch.setattr(device_loop, "_publish", store)
    monkeypatch.setattr(device_loop, "_CHUNK", tl.constexpr(32))  # an entry has several
    for op in (begin_loop, advance_loop, end_signals):
        monkeypatch.setitem(CASES["play"].__globals__, op.__name__, launcher(op))
    for seed in range(6):
        for _, got, want in CASES["play"](seed, "cpu"):
            assert got == want
