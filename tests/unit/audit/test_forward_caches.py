"""Caches of a forward that make padding change live rows are found by removing them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit.finding_kinds import FindingKind
from graphkit.audit.padding_cause import padding_cause
from graphkit.audit.runs.equal_state_runs import EqualStateRuns
from graphkit.graphs import StateSnapshot

VOCAB, WIDTH = 16, 2
VERIFY = gk.ForwardMode.TARGET_VERIFY


class Cached(nn.Module):
    """Adds metadata to its logits that ``metadata(self, inputs)`` caches, or not."""

    def __init__(self, metadata):
        super().__init__()
        self.metadata = metadata
        self.kept, self.by_size, self.plan = None, {}, SimpleNamespace()
        self.register_buffer("eye", torch.eye(VOCAB))
        self.register_buffer("scale", torch.ones(VOCAB), persistent=False)

    def forward(self, inputs):
        rows = self.eye[inputs.input_ids] * self.scale
        return gk.ForwardOutput(next_token_logits=rows + self.metadata(self, inputs)[:, None])


def mask_of(rows):
    """Return which rows belong to one request, flat."""
    request = torch.arange(rows) // WIDTH
    return (request[:, None] == request).float().flatten()


def rows_seen(mask, rows):
    return mask[: rows**2].view(rows, rows).sum(1)


def by_attribute(model, inputs):
    if model.kept is None:
        model.kept = mask_of(inputs.num_tokens)
    return rows_seen(model.kept, inputs.num_tokens)


def by_missing_attribute(model, inputs):
    if not hasattr(model.plan, "kept"):
        model.plan.kept = mask_of(inputs.num_tokens)
    return rows_seen(model.plan.kept, inputs.num_tokens)


def by_object(model, inputs):
    if model.kept is None:
        model.kept = SimpleNamespace(mask=mask_of(inputs.num_tokens), rows=inputs.num_tokens)
    return rows_seen(model.kept.mask, inputs.num_tokens)


def by_object_in_a_dict(model, inputs):
    if "plan" not in model.by_size:
        model.by_size["plan"] = [mask_of(inputs.num_tokens), inputs.num_tokens]
    return rows_seen(model.by_size["plan"][0], inputs.num_tokens)


def by_size(model, inputs):
    size = inputs.num_tokens
    if size not in model.by_size:
        model.by_size[size] = inputs.input_ids / VOCAB
    return model.by_size[size]


def by_number_of_rows(model, inputs):
    return torch.full((inputs.num_tokens,), 1 / inputs.num_tokens)


def batch_of(requests, seed=0):
    rows = requests * WIDTH
    generator = torch.Generator().manual_seed(seed)
    return gk.TargetVerifyInputs(
        req_pool_indices=torch.arange(1, requests + 1),
        seq_lens=torch.full((requests,), 3).int(),
        input_ids=torch.randint(1, VOCAB, (rows,), generator=generator),
        positions=torch.ones(rows, dtype=torch.int64),
        out_cache_loc=torch.arange(1, rows + 1),
    )


def cause_of(metadata):
    model = Cached(metadata)
    with gk.TargetVerifyRunner(
        model, spec=gk.SpecConfig("NGRAM", WIDTH - 1, 1, WIDTH), batch_sizes=[4], device="cpu",
        sizes=gk.BufferSizes(4, 64, 8, VOCAB, torch.float32),
    ) as runner:  # fmt: skip
        runner.capture()
        held = (model.kept, dict(model.by_size), dict(vars(model.plan)))
        with StateSnapshot({}, runner.device) as start:
            runs = EqualStateRuns(runner, batch_of(3), 4, start)
            runs.padded()
            assert runs.padding_difference() is not None
            cause = padding_cause(runs)
        assert model.kept is held[0]
        assert {**held[1]}.items() <= model.by_size.items()
        assert vars(model.plan).keys() == held[2].keys()
    return cause


@pytest.mark.parametrize(
    ("metadata", "bug", "name"),
    [
        (by_attribute, FindingKind.METADATA_OF_ANOTHER_SIZE, "Cached.kept"),
        (by_missing_attribute, FindingKind.METADATA_OF_ANOTHER_SIZE, "Cached.plan.kept"),
        (by_object, FindingKind.METADATA_OF_ANOTHER_SIZE, "Cached.kept.mask"),
        (by_object_in_a_dict, FindingKind.METADATA_OF_ANOTHER_SIZE, "Cached.by_size['plan'][0]"),
        (by_size, FindingKind.LAZY_CACHE, "Cached.by_size[8]"),
    ],
)
def test_a_cache_at_fault_is_named(metadata, bug, name):
    cause = cause_of(metadata)
    assert (cause.kind, cause.cache.name) == (bug, name)
    assert f"It reads `{name}` (float32 [" in cause.text
    assert cause.first.origin.source


def test_without_a_cache_the_batch_size_itself_is_the_cause():
    cause = cause_of(by_number_of_rows)
    assert (cause.kind, cause.cache) == (FindingKind.DEPENDENCE_ON_THE_BATCH_SIZE, None)
