"""A step with atomic additions, which round differently in every run on a GPU, is no error."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from graphkit.audit import audit_target
from graphkit.testing import assert_target_equivalent

VERIFY, VOCAB, WIDTH, TERMS = gk.ForwardMode.TARGET_VERIFY, 64, 4, 128


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCAB, TERMS, VOCAB, generator=generator).to(request.param) / TERMS**0.5

    def forward(inputs):
        """Add the terms of each row with ``index_add_``, whose CUDA kernel adds atomically."""
        terms = table[inputs.input_ids].flatten(0, 1)
        rows = torch.arange(inputs.num_tokens, device=terms.device).repeat_interleave(
            TERMS, output_size=len(terms)
        )
        sums = torch.zeros(inputs.num_tokens, VOCAB, device=terms.device)
        return gk.ForwardOutput(next_token_logits=sums.index_add_(0, rows, terms))

    def sample_batch(_mode, batch_size, seed):
        rows = WIDTH * batch_size
        ids = torch.randint(VOCAB, (rows,), generator=torch.Generator().manual_seed(seed))
        return gk.TargetVerifyInputs(
            req_pool_indices=torch.arange(1, batch_size + 1),
            seq_lens=torch.full((batch_size,), 5, dtype=torch.int32),
            input_ids=ids,
            positions=5 + torch.arange(rows) % WIDTH,
            out_cache_loc=torch.arange(1, rows + 1),
        )

    return gk.CaptureTarget(
        name="atomic",
        spec=gk.SpecConfig("NGRAM", WIDTH - 1, 1, WIDTH),
        sizes=gk.BufferSizes(4, 64, VOCAB, VOCAB, torch.float32),
        forwards={VERIFY: forward},
        sample_batch=sample_batch,
        weights={"table": table},
        batch_sizes=[4],
    )


def test_captures_and_the_kit_accept_it(target):
    device = target.weights["table"].device.type
    assert gk.capture_target(target, device=device).mismatches == ()
    assert_target_equivalent(target, device=device)


def test_audits_note_it_at_most(target):
    device = target.weights["table"].device.type
    report = audit_target(target, only=["pads", "shadow"], device=device)
    assert {(each.kind, each.severity) for each in report.findings} <= {
        ("nondeterministic rounding", "note"),
        ("rounding depends on other rows", "note"),
    }
