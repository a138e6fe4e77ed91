"""Small models, right and wrong, and pytest inside a test."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

import pytest

import graphkit as gk
from graphkit.audit.kit import collection
from graphkit.testing import assert_target_equivalent
from small_targets import llama_target

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
VOCAB = 16
TARGETS = f"""
import torch
import graphkit as gk

def target_of(mix, modes=("TARGET_VERIFY",), **facts):
    def forward(inputs):
        rows = torch.nn.functional.embedding(inputs.input_ids, torch.eye({VOCAB}))
        return gk.ForwardOutput(next_token_logits=mix(rows + inputs.positions[:, None] / 64))

    def sample_batch(mode, batch_size, seed):
        generator = torch.Generator().manual_seed(seed)
        rows = batch_size * (1 if mode is gk.ForwardMode.DECODE else 2)
        return gk.TargetVerifyInputs(
            req_pool_indices=torch.arange(1, batch_size + 1),
            seq_lens=torch.full((batch_size,), 3).int(),
            input_ids=torch.randint(1, {VOCAB} - 1, (rows,), generator=generator),
            positions=torch.randint(1, 9, (rows,), generator=generator),
            out_cache_loc=torch.arange(1, rows + 1),
        )

    return gk.CaptureTarget(
        name="small",
        spec=gk.SpecConfig("EAGLE", 1, 1, 2),
        sizes=gk.BufferSizes(3, 32, 8, {VOCAB}, torch.float32),
        forwards={{gk.ForwardMode[mode]: forward for mode in modes}},
        sample_batch=sample_batch,
        batch_sizes=[1, 3],
        **facts,
    )
"""
"""A module of small targets; ``target_of(mix)`` returns one whose bug is ``mix(rows)``."""

_space: dict[str, object] = {}
exec(TARGETS, _space)


@pytest.fixture(scope="session")
def target_of():
    """Return ``target_of(mix, modes=, **facts)``: 2 rows of 16 logits per request; sizes 1, 3."""
    return _space["target_of"]


@pytest.fixture(scope="module", params=[1, 2], ids=["chain", "tree"])
def real_target(request):
    """Return small real models in every mode."""
    return llama_target(topk=request.param, max_batch_size=3)


@pytest.fixture(scope="session")
def loaded():
    """Import what pytest inside a test needs: it unloads modules that it imports first."""
    assert collection.PROPERTIES
    import_module("torch._dynamo")  # it registers operators, which is possible once per process
    assert_target_equivalent(_space["target_of"](lambda rows: rows), device="cpu")


@pytest.fixture
def run_pytest(pytester, loaded):
    """Return ``run_pytest(mix, *args)``, with the source ``mix`` planted in ``models:target``."""
    is_installed = any(each.name == "graphkit" for each in entry_points(group="pytest11"))
    plugin = [] if is_installed else ["-p", "graphkit.testing.plugin"]
    others = [part for name in ("hypothesispytest", "anyio") for part in ("-p", f"no:{name}")]

    def run(mix, *args, **facts):
        made = f"target_of({mix}{''.join(f', {name}={value}' for name, value in facts.items())})"
        pytester.makepyfile(models=f"{TARGETS}\ntarget = {made}")
        return pytester.runpytest_inprocess(*plugin, *others, "-p", "no:cacheprovider", *args)

    return run


@pytest.fixture
def run_target(run_pytest):
    """Return ``run_pytest`` with ``--graphkit models:target`` on the CPU."""
    ours = ("--graphkit", "models:target", "--graphkit-device", "cpu")
    return lambda mix, *args, **facts: run_pytest(mix, *ours, *args, **facts)
