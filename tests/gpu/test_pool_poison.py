"""The audit of stale pool memory on CUDA: planted reads are found, and the pool is restored."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from declared_modes import every_mode
from graphkit.audit import AuditLog
from graphkit.audit.stale_memory.runner_graph import audit_stale_memory
from graphkit.models.reference import reference_target
from tiny_target import (
    REQUESTS,
    VERIFY,
    TinyLayers,
    bytes_of,
    check_failed_audits,
    sample_batch,
    target_of,
)

pytestmark = pytest.mark.gpu
HIDDEN = 64


class Tiny(TinyLayers):
    """Allocates with ``allocate(model)`` at the start of a step, and uses that with ``use``.

    The first allocation of a capture does not reuse memory that the same graph has written.
    """

    def __init__(self, allocate, use):
        super().__init__(HIDDEN, "cuda")
        self.allocate, self.use = allocate, use

    def forward(self, inputs):
        self.calls += 1
        memory = self.allocate(self)
        hidden = self.use(self.embedding(inputs.input_ids), memory)
        self.cache.index_copy_(0, inputs.out_cache_loc, hidden)
        return gk.ForwardOutput(next_token_logits=self.head(hidden), hidden_states=hidden)


@pytest.fixture
def captured():
    """Return ``captured(allocate, use, sizes)``: a model and its runner with its own pool."""
    runners = []

    def make(allocate, use, sizes=(REQUESTS,)):
        model = Tiny(allocate, use)
        runner = target_of(model).runner(VERIFY, batch_sizes=sizes, backend=gk.CudaBackend())
        runners.append(runner)
        runner.capture(attribution=gk.Attribution(model))
        return model, runner

    yield make
    for runner in runners:
        runner.close()


def audited(model, runner, **facts):
    log = AuditLog()
    audit_stale_memory(target_of(model, **facts), runner, log)
    return log.findings


def kept_bias(model):
    model.kept["bias"] = torch.empty(HIDDEN, device="cuda")
    return model.kept["bias"]


def scratch(_model):
    return torch.empty(HIDDEN, device="cuda")


def added(hidden, memory):
    return hidden + memory


def masked(hidden, memory):
    return hidden + memory * torch.zeros_like(memory)


@pytest.mark.parametrize(("value", "content"), [(0.5, "zeros"), (0.0, "other numbers")])
def test_memory_that_the_host_fills(captured, value, content):
    model, runner = captured(kept_bias, added)
    model.kept["bias"].fill_(value)
    before = bytes_of(runner)
    (finding,) = audited(model, runner)
    assert (finding.severity, finding.kind) == ("error", "stale pool memory")
    assert finding.names == ("Tiny.kept['bias']",)
    assert finding.source.endswith("in added")
    assert finding.module == "Tiny"
    assert finding.argument is not None
    assert f"With {content} there, row 0 of next_token_logits (request 0 of 4)" in finding.text
    assert "allocated by `empty` at gpu/test_pool_poison.py:" in finding.text
    assert torch.equal(bytes_of(runner), before)
    assert audited(model, runner, persistent_tensors=model.kept) == []


@pytest.mark.parametrize("use", [added, masked], ids=["read", "multiplied by zero"])
def test_scratch_memory_that_nothing_writes(captured, use):
    model, runner = captured(scratch, use)
    (finding,) = audited(model, runner)
    assert finding.names == ()
    assert finding.source.endswith(f"in {use.__name__}")
    assert ": memory allocated by `empty` at gpu/test_pool_poison.py:" in finding.text


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: torch.arange(HIDDEN, device="cuda") + 0.5, lambda x, table: x + table),
        (lambda: torch.arange(HIDDEN, device="cuda").flip(0), lambda x, table: x[:, table]),
    ],
    ids=["numbers", "indices"],
)
def test_a_table_that_the_graph_of_another_size_computes(captured, make, use):
    def allocate(model):
        if model.calls == 3:  # the first capture
            model.kept["table"] = make()
        return model.kept.get("table")

    model, runner = captured(
        allocate, lambda x, table: x if table is None else use(x, table), sizes=(2, REQUESTS)
    )
    (finding,) = audited(model, runner)
    assert (finding.batch_size, finding.names) == (2, ("Tiny.kept['table']",))
    assert finding.source.endswith("in <lambda>")


def test_addresses_in_the_pool_are_not_overwritten(captured):
    """A kernel that follows a null pointer would end the process."""
    model, runner = captured(
        lambda m: m.kept.setdefault(m.calls, torch.empty(64, dtype=torch.int64, device="cuda")),
        lambda hidden, _memory: hidden,
    )
    pointers = model.kept[3]
    pointers.fill_(model.cache.data_ptr())
    seen = []

    def watch(launch):
        seen.append(pointers.clone())
        return launch()

    with runner.observe(watch):
        assert audited(model, runner) == []
    assert len(seen) == 2, "one replay as it is, and one over zeros: no float may be stale there"
    assert all((each == model.cache.data_ptr()).all() for each in seen)


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
@every_mode
def test_the_reference_target_has_no_finding_in_any_mode(mode, topk):
    target, log = reference_target("cuda", topk=topk, max_batch_size=8), AuditLog()
    with target.runner(mode, batch_sizes=[1, 8], device="cuda") as runner:
        runner.capture(attribution=gk.Attribution(target.weights))
        audit_stale_memory(target, runner, log)
    assert log.findings == []
    assert [check.text.startswith("overwrote ") for check in log.checks] == [True, True]


def test_a_failed_audit_leaves_the_runner_usable(captured, monkeypatch):
    model, runner = captured(kept_bias, added)
    model.kept["bias"].fill_(0.5)
    check_failed_audits(target_of(model), runner, monkeypatch)


def test_replays_of_another_stream_and_another_runner_of_the_pool(captured):
    model, runner = captured(kept_bias, added)
    model.kept["bias"].fill_(0.5)
    other_model = Tiny(scratch, lambda hidden, _memory: hidden)
    other = target_of(other_model).runner(VERIFY, batch_sizes=[2], backend=runner.backend)
    with other:
        other.capture(attribution=gk.Attribution())
        batch = sample_batch(VERIFY, 2, 0)
        expected = other.replay(batch, clone=True).next_token_logits
        with torch.cuda.stream(torch.cuda.Stream()):
            (finding,) = audited(model, runner)
        assert finding.names == ("Tiny.kept['bias']",)
        assert torch.equal(other.replay(batch).next_token_logits, expected)
