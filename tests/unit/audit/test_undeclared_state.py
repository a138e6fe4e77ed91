"""State of requests that the target does not declare is found, reported once, and restored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit import AuditLog, audit_target, undeclared_state as module
from graphkit.audit.undeclared_state import declare_for_audits, undeclared_state
from tiny_target import SLOTS, VERIFY, VOCAB, small_target

HIDDEN = 8


class Model(nn.Module):
    """Writes tensors by slot and by request, a counter, and a cache of constants."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.pool = torch.zeros(2, SLOTS, HIDDEN, dtype=torch.bfloat16)
        self.by_request = torch.zeros(9)
        self.register_buffer("counter", torch.zeros(()))
        self.register_buffer("unused", torch.ones(SLOTS, HIDDEN))
        self.requires_grad_(False)

    def forward(self, inputs):
        hidden = self.embedding(inputs.input_ids)
        history = self.pool[0, inputs.out_cache_loc].float() + self.unused[inputs.out_cache_loc]
        self.pool[0].index_copy_(0, inputs.out_cache_loc, hidden.bfloat16())
        self.by_request[inputs.req_pool_indices] = inputs.seq_lens.float()
        self.counter.add_(1)
        return gk.ForwardOutput(next_token_logits=self.head(hidden + history))


@pytest.fixture
def target():
    model = Model()
    return small_target(model, weights=model, batch_sizes=[1, 4])


def test_only_what_has_rows_of_requests_is_state(target):
    model = target.forwards[VERIFY]
    with target.runner(VERIFY, device="cpu") as runner:
        runner.capture()
        before = {name: each.clone() for name, each in vars(model).items() if "pool" in name}
        batch = target.batch(VERIFY, 4, 1)
        runner.replay(batch)
        written = model.pool.clone()
        found, left = undeclared_state(runner, batch)  # which writes the same rows again
        assert set(found) == {"Model.pool", "Model.by_request"}
        assert left == []
        assert found["Model.pool"] is model.pool
        assert torch.equal(model.pool, written)
        assert not torch.equal(model.pool, before["pool"])
        assert runner.stats.replays == 1


def test_declared_state_is_not_reported(target):
    model = target.forwards[VERIFY]
    state = {"pool": model.pool, "rows": model.by_request}
    with replace(target, mutable_state=state).runner(VERIFY, device="cpu") as runner:
        runner.capture()
        log = AuditLog()
        declare_for_audits(target, runner, log)
        assert (log.findings, [*runner.mutable_state]) == ([], ["pool", "rows"])


def test_undeclared_state_is_one_warning_and_nothing_follows_from_it(target):
    for only in (["pads"], ["shadow"], ["warmup", "pads", "shadow"]):
        report = audit_target(target, only=only, device="cpu")
        kinds = [each.kind for each in report.findings if "counter" not in each.text]
        assert kinds == ["undeclared state"], report.findings
        assert set(report.findings[-1].names) == {"Model.pool", "Model.by_request"}


def test_tensors_beyond_the_budget_are_listed_and_neither_copied_nor_searched(target, monkeypatch):
    model = target.forwards[VERIFY]
    # All but the two largest: the pool of 2 x 64 x 8 bfloat16, and the buffer of 64 x 8 float32.
    monkeypatch.setattr(module, "COPY_BUDGET", model.pool.nbytes - 1)
    with target.runner(VERIFY, device="cpu") as runner:
        runner.capture()
        found, left = undeclared_state(runner, target.batch(VERIFY, 4, 1))
        assert [*found] == ["Model.by_request"]
        assert sorted(left) == ["Model.pool", "Model.unused"]
        log = AuditLog()
        declare_for_audits(target, runner, log)
        (check,) = log.checks
        assert "; not searched, beyond 0 MiB of copies: " in check.text
        assert all(name in check.text for name in left)
        assert [*runner.mutable_state] == ["Model.by_request"]
