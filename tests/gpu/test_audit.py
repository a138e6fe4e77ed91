"""Tests of audits on CUDA, with real kernels and planted bugs."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit import AuditLog, audit_target, graph_baseline
from graphkit.audit.pointers import audit_pointers
from graphkit.models.reference import reference_target

pytestmark = pytest.mark.gpu
MODE = gk.ForwardMode.TARGET_VERIFY
QUICK = ["frozen", "pointers"]


@pytest.fixture(scope="module")
def reference():
    return reference_target("cuda", max_batch_size=8)


def sample(_mode, batch_size, seed):
    ids = np.random.default_rng(seed).integers(0, 64, 4 * batch_size)
    return gk.TargetVerifyInputs(
        req_pool_indices=np.arange(1, batch_size + 1),
        seq_lens=np.full(batch_size, 4, np.int32),
        input_ids=ids,
        positions=np.arange(4 * batch_size),
        out_cache_loc=np.arange(1, 4 * batch_size + 1),
    )


def target_of(forward, model, **facts):
    return gk.CaptureTarget(
        name="tiny",
        spec=gk.SpecConfig("EAGLE", num_steps=3, topk=1, num_draft_tokens=4),
        sizes=gk.BufferSizes(4, 128, 64, 64, torch.float32),
        forwards={MODE: lambda i: gk.ForwardOutput(next_token_logits=forward(i))},
        sample_batch=sample,
        weights=model,
        **facts,
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)).cuda()


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_the_reference_target_has_no_finding(topk):
    target = reference_target("cuda", topk=topk, max_batch_size=8)
    report = audit_target(target, only=QUICK, batch_sizes=[2, 8], device="cuda")
    assert {finding.kind for finding in report.findings} == {"architecture constants"}
    certificates = [check for check in report.checks if check.text.startswith("captured again")]
    assert len(certificates) == len(target.forwards)
    assert all(": 0 differences" in check.text for check in certificates)


def test_two_reports_are_equal(reference):
    one, other = (
        audit_target(reference, only=QUICK, modes=[MODE], batch_sizes=[8], device="cuda")
        for _ in range(2)
    )
    assert one.findings == other.findings
    assert [check.text for check in one.checks] == [check.text for check in other.checks]


@pytest.mark.parametrize("values", [(0.7, 0.9), (1.0, 2.0)])
def test_a_scalar_in_a_struct_argument_is_reported(model, values):
    settings = {"temperature": values[0]}
    target = target_of(
        lambda i: model(i.input_ids) / settings["temperature"],
        model,
        host_values={"temperature": (lambda v: settings.update(temperature=v), values)},
    )
    report = audit_target(target, only=["frozen"], device="cuda")
    assert report.findings
    assert {finding.kind for finding in report.findings} == {"frozen value"}
    assert all("follows `temperature` (" in finding.text for finding in report.findings)
    assert {size for finding in report.findings for size in finding.batch_sizes} == {1, 4}
    first = report.findings[0]
    assert (float(first.before), float(first.after)) == pytest.approx(
        (1 / values[0], 1 / values[1])
    )


def test_a_counter_in_a_struct_argument_is_not_taken_for_unset_bytes(model):
    counter = itertools.count()
    report = audit_target(
        target_of(lambda i: model(i.input_ids) * (1.5 + next(counter)), model),
        only=["frozen"], device="cuda",
    )  # fmt: skip
    assert "capture is not deterministic" in {finding.kind for finding in report.findings}


def test_a_scale_inside_a_library_kernel_is_reported():
    settings = {"scale": 0.125}
    model = nn.Embedding(64, 64).cuda().half()

    def forward(i):
        q = model(i.input_ids).view(i.batch_size, 4, 1, 64).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, scale=settings["scale"]).flatten(
            0, 2
        )

    target = target_of(
        forward, model, host_values={"scale": (lambda v: settings.update(scale=v), (0.125, 0.25))}
    )
    report = audit_target(target, only=["frozen"], device="cuda")
    assert any("scale" in finding.text for finding in report.findings)


def test_an_undeclared_scalar_is_a_note(model):
    settings = {"temperature": 0.7}
    target = target_of(lambda i: model(i.input_ids) / settings["temperature"], model)
    report = audit_target(target, only=["frozen"], device="cuda")
    (finding,) = [each for each in report.findings if each.kind == "frozen value"]
    assert finding.severity == "note"
    assert finding.names[0].endswith("settings['temperature']")
    assert finding.source


def test_a_scalar_that_has_changed_is_refused_in_the_checking_mode(model, monkeypatch):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    settings = {"temperature": 0.7, "steps": 0}
    target = target_of(
        lambda i: model(i.input_ids) / (settings["temperature"] or settings["steps"]), model
    )
    with target.runner(MODE, batch_sizes=[4], device="cuda") as runner:
        runner.capture(attribution=gk.Attribution())
        settings["steps"] = 7
        runner.replay(sample(MODE, 4, 1))
        settings["temperature"] = 0.9
        with pytest.raises(gk.ReplayError, match=r"settings\['temperature'\]` has changed since"):
            runner.replay(sample(MODE, 4, 1))


def test_a_freed_weight_is_found_in_a_descriptor_that_points_to_it():
    """cuBLAS keeps the weight's address in a descriptor inside one large argument."""
    model = nn.Sequential(nn.Embedding(64, 2048), nn.Linear(2048, 64, bias=False)).cuda().bfloat16()
    target = target_of(lambda i: model(i.input_ids).float(), None)
    runner = target.runner(MODE, batch_sizes=[4], device="cuda")
    with runner:
        runner.capture(attribution=gk.Attribution())
        before = AuditLog()
        audit_pointers(target, runner, before)
        model[1].weight = nn.Parameter(torch.zeros(64, 2048, device="cuda", dtype=torch.bfloat16))
        gc.collect()
        after = AuditLog()
        audit_pointers(target, runner, after)
    assert "freed memory" not in {finding.kind for finding in before.findings}
    freed = [finding for finding in after.findings if finding.kind == "freed memory"]
    assert freed
    assert any("nvjet" in finding.kernel or "gemm" in finding.kernel for finding in freed)


def test_a_lock_matches_another_capture_and_reports_changes(reference, model):
    lock = graph_baseline(reference, modes=[MODE], batch_sizes=[8], device="cuda")
    same = audit_target(reference, only=[], modes=[MODE], batch_sizes=[8], device="cuda", lock=lock)
    assert not same.findings
    settings = {"silu": True}

    def forward(i):
        hidden = model(i.input_ids)
        return nn.functional.silu(hidden) if settings["silu"] else nn.functional.gelu(hidden)

    target = target_of(forward, model)
    lock = graph_baseline(target, batch_sizes=[4], device="cuda")
    settings["silu"] = False
    (finding,) = audit_target(target, only=[], batch_sizes=[4], device="cuda", lock=lock).findings
    assert "silu" in finding.text.lower()
    assert "gelu" in finding.text.lower()
