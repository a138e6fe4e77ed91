"""A small capture target around a model that a test writes, for audits of memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit import AuditLog
from graphkit.audit.stale_memory.runner_graph import RunnerGraph, audit_stale_memory

VERIFY = gk.ForwardMode.TARGET_VERIFY
VOCAB, WIDTH, REQUESTS, SLOTS = 32, 4, 4, 64


class TinyLayers(nn.Module):
    """Two layers and a cache, without a forward.

    Attributes:
        kept: Tensors by name, for forwards that keep what they allocate.
        calls: Number of forwards since the model was made, which the forward counts. The first size
            that is captured runs twice to warm up, and is then captured.
    """

    def __init__(self, hidden_size, device):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, hidden_size)
        self.head = nn.Linear(hidden_size, VOCAB)
        self.register_buffer("cache", torch.zeros(SLOTS, hidden_size))
        self.to(device).requires_grad_(False)
        self.kept, self.calls = {}, 0


def sample_batch(_mode, batch_size, seed):
    """Return a batch whose tokens depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = batch_size * WIDTH
    return gk.TargetVerifyInputs(
        req_pool_indices=1 + torch.arange(batch_size),
        seq_lens=torch.full((batch_size,), 5, dtype=torch.int32),
        input_ids=torch.randint(1, VOCAB, (tokens,), generator=generator),
        positions=torch.arange(tokens),
        out_cache_loc=1 + torch.arange(tokens),
    )


def small_target(forward, hidden_size=8, requests=REQUESTS, **facts):
    """Return a target of one TARGET_VERIFY forward; ``facts`` replace fields."""
    return gk.CaptureTarget(
        **{
            "name": "tiny",
            "spec": gk.SpecConfig("EAGLE", WIDTH - 1, 1, WIDTH),
            "sizes": gk.BufferSizes(requests, 64, hidden_size, VOCAB, torch.float32),
            "forwards": {VERIFY: forward},
            "sample_batch": sample_batch,
            **facts,
        }
    )


def target_of(model, **facts):
    """Return a target that declares weights and cache of the model; ``facts`` replace fields."""
    declared = {
        "weights": dict(model.named_parameters()),
        "mutable_state": {"cache": model.cache},
        "batch_sizes": [REQUESTS],
    }
    return small_target(model, model.embedding.embedding_dim, **declared | facts)


def logits_of(forward):
    """Return a forward whose logits are those that ``forward(inputs)`` returns."""
    return lambda inputs: gk.ForwardOutput(next_token_logits=forward(inputs))


def log_of(audit, target, *, is_captured=True, mode=VERIFY, tolerance=1.0, **settings):
    """Return the log of an audit of a target's runner on the CPU."""
    log = AuditLog(tolerance)
    with target.runner(mode, device="cpu", **settings) as runner:
        if is_captured:
            runner.capture(attribution=gk.Attribution(target.weights))
        audit(target, runner, log)
    return log


def bytes_of(runner):
    """Return a copy of the pool memory of all graphs."""
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
    blocks = [block for graph in runner.graphs.values() for block in graph.pool_memory()]
    return torch.cat([block.data for block in blocks]).clone()


def check_failed_audits(target, runner, monkeypatch):
    """Let the search of the poison audit fail; memory and runner must stay as they were."""
    batch = sample_batch(VERIFY, REQUESTS, 0)
    expected, before = runner.replay(batch, clone=True).next_token_logits, bytes_of(runner)

    def fail(self, poison, *_args):
        self.memory.overwrite(poison)
        raise RuntimeError("the search failed")

    for method in ("effect", "image"):
        with monkeypatch.context() as patched:
            patched.setattr(RunnerGraph, method, fail)
            with pytest.raises(RuntimeError, match="the search failed"):
                audit_stale_memory(target, runner, AuditLog())
        assert torch.equal(bytes_of(runner), before)
        assert torch.equal(runner.replay(batch).next_token_logits, expected)
