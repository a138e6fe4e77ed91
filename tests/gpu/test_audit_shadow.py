"""The shadow audit on CUDA finds nothing in sound graphs, and the wrong node in wrong ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import nn

import graphkit as gk
from declared_modes import every_mode
from graphkit.audit import AuditLog
from graphkit.audit.shadow.watch import ShadowWatch, audit_shadow
from graphkit.models.reference import reference_target

pytestmark = pytest.mark.gpu
VOCAB, HIDDEN, WIDTH, LARGEST = 32, 64, 4, 8


@triton.jit
def scale_kernel(rows, out, count, SCALE: tl.constexpr):
    """Multiply by a factor that is compiled into the code and is no argument."""
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(out + at, tl.load(rows + at, at < count) * SCALE, at < count)


class Model(nn.Module):
    """A few layers around one whose behaviour a test can change."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.before = nn.Sequential(*[nn.Linear(HIDDEN, HIDDEN) for _ in range(4)])
        self.after = nn.Sequential(*[nn.Linear(HIDDEN, HIDDEN) for _ in range(4)])
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.scale = 1.0
        self.in_code = np.array(2.0)  # no number, which the search for host values would find
        self.table = torch.ones(HIDDEN, device="cuda")
        self.to("cuda").requires_grad_(False)

    def forward(self, inputs):
        hidden = self.before(self.embedding(inputs.input_ids)) * self.scale + self.table
        scaled = torch.empty_like(hidden)
        scale_kernel[(triton.cdiv(hidden.numel(), 256),)](
            hidden, scaled, hidden.numel(), SCALE=float(self.in_code)
        )
        hidden = self.after(scaled)
        return gk.ForwardOutput(next_token_logits=self.head(hidden), hidden_states=hidden)


def batch_of(requests, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = requests * WIDTH
    return gk.TargetVerifyInputs(
        req_pool_indices=torch.arange(1, requests + 1),
        seq_lens=torch.full((requests,), 5, dtype=torch.int32),
        input_ids=torch.randint(0, VOCAB, (tokens,), generator=generator),
        positions=torch.arange(tokens),
        out_cache_loc=torch.arange(1, tokens + 1),
    )


@pytest.fixture
def captured():
    """Yield a captured runner with its own memory pool, and its model."""
    model = Model()
    with gk.TargetVerifyRunner(
        model, spec=gk.SpecConfig("NGRAM", WIDTH - 1, 1, WIDTH), batch_sizes=[2, LARGEST],
        sizes=gk.BufferSizes(LARGEST, 64, HIDDEN, VOCAB, torch.float32), backend=gk.CudaBackend(),
    ) as runner:  # fmt: skip
        runner.capture()
        yield runner, model


def found_by(captured, live=2, **options):
    """Return the findings of a replay, after checking that its output is as without the watch."""
    runner, model = captured
    right = runner.replay(batch_of(live), clone=True).next_token_logits
    with ShadowWatch(runner, every=1, weights=model, bisect=True, **options) as watch:
        output = runner.replay(batch_of(live))
        assert torch.equal(output.next_token_logits, right)
    assert torch.equal(runner.replay(batch_of(live)).next_token_logits, right)
    return watch.findings


@every_mode
def test_the_reference_target_has_no_finding_in_any_mode(mode):
    target, log = reference_target("cuda", max_batch_size=LARGEST), AuditLog()
    with target.runner(mode, batch_sizes=[1, LARGEST], device="cuda") as runner:
        runner.capture()
        audit_shadow(target, runner, log)
    assert log.findings == []
    assert len(log.checks) == 2


def test_sound_replays_have_no_finding(captured):
    for live in (1, 2, 5, 8):
        assert found_by(captured, live) == []


def test_a_frozen_number(captured):
    captured[1].scale = 0.5
    (finding,) = found_by(captured)
    assert finding.kind == "frozen value"
    assert finding.kernel.endswith("[mul]") or "mul" in finding.kernel.lower()
    assert finding.source.endswith("in forward")
    assert "`Model.scale` has changed since capture (1.0, then 0.5)" in finding.text


def test_memory_that_was_replaced(captured):
    before, captured[1].table = captured[1].table, torch.zeros(HIDDEN, device="cuda")
    (finding,) = found_by(captured)
    assert before.all()  # kept alive, so that its memory is not reused
    assert finding.kind == "frozen value"
    assert finding.names == ("Model.table",)
    assert "`Model.table` is another tensor than at capture" in finding.text
    assert "add" in finding.kernel.lower()


@pytest.mark.parametrize("live", [2, LARGEST])
def test_changed_code_is_found_by_bisection(captured, live):
    captured[1].in_code = np.array(3.0)
    (finding,) = found_by(captured, live)
    assert finding.kind == "graph bug"
    assert finding.kernel == "scale_kernel", finding.text
    assert "is the first with different results in a new capture" in finding.text


def test_staged_batches_and_two_streams(captured):
    runner, model = captured
    with ShadowWatch(runner, every=2, weights=model) as watch:
        for turn in range(6):
            with torch.cuda.stream(torch.cuda.Stream() if turn % 3 else runner.backend.stream):
                runner.replay(batch_of(1 + turn, turn))
        staged = runner.stage(2)
        batch = batch_of(2)
        for name in ("req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc"):
            getattr(staged, name)[:] = getattr(batch, name).numpy()
        staged.replay()
    assert watch.compared == 3
    assert watch.findings == []
