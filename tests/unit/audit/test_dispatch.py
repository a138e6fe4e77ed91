"""Tests of the search for batches without a graph and graphs without a batch."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import graphkit as gk
from declared_modes import MODES
from graphkit.audit import AuditLog
from graphkit.audit.audit_log import spans
from graphkit.audit.dispatch import audit_dispatch
from graphkit.models.reference import reference_target
from no_metadata import NoMetadata
from tiny_target import VERIFY, VOCAB, WIDTH, small_target

DECODE = gk.ForwardMode.DECODE
DRAFT, EXTEND = gk.ForwardMode.DRAFT, gk.ForwardMode.DRAFT_EXTEND
EXTEND_V2, LAYERS = gk.ForwardMode.DRAFT_EXTEND_V2, gk.ForwardMode.MULTI_LAYER_EAGLE
HIDDEN, REQUESTS = 8, 8
CHAIN = gk.SpecConfig("NGRAM", WIDTH - 1, 1, WIDTH)
EAGLE = gk.SpecConfig("EAGLE", WIDTH - 1, 1, WIDTH)


def never(inputs):
    raise AssertionError("the audit runs no forward")


def batch_of(requests, width=WIDTH, **more):
    return gk.TargetVerifyInputs(
        req_pool_indices=np.arange(1, requests + 1),
        seq_lens=np.full(requests, 5),
        input_ids=np.zeros(requests * width, dtype=np.int64),
        positions=np.zeros(requests * width, dtype=np.int64),
        out_cache_loc=np.arange(1, requests * width + 1),
        **more,
    )


@dataclass
class Found:
    """Findings about the batches of a mode, those about missing modes, and the summary."""

    batches: list
    modes: list
    text: str


def audited(sample_batch=lambda mode, batch_size, seed: batch_of(batch_size), **changes):
    facts = {"spec": CHAIN, "sample_batch": sample_batch, "batch_sizes": [1, 2, 4, 8], **changes}
    log = AuditLog()
    audit_dispatch(small_target(never, requests=REQUESTS, **facts), log, device="cpu")
    found = log.findings
    return Found([f for f in found if f.mode], [f for f in found if not f.mode], log.checks[0].text)


@pytest.mark.parametrize("topk", [1, 2])
def test_the_reference_target_has_no_finding(topk):
    log = AuditLog()
    audit_dispatch(reference_target("cpu", topk=topk), log, device="cpu")
    assert log.findings == []
    assert [check.mode for check in log.checks[:-1]] != []
    assert {check.mode for check in log.checks} == {"", *(mode.name for mode in MODES)}
    for check in log.checks[:-1]:
        assert check.text == (
            "8 of 8 batch sizes with a graph; 16% of rows are pads, at most 38% (5 requests at "
            "size 8)"
        )


def test_a_correct_target_has_no_finding():
    found = audited()
    assert (found.batches, found.modes) == ([], [])


def test_only_the_given_modes_are_checked():
    target, log = reference_target("cpu", max_batch_size=1), AuditLog()
    audit_dispatch(target, log, modes=[DECODE], device="cpu")
    assert [check.mode for check in log.checks] == ["DECODE"]


def test_a_field_that_was_not_captured():
    def sample_batch(mode, batch_size, seed):
        mask = np.ones((batch_size, WIDTH, WIDTH), dtype=bool) if batch_size in (2, 3, 7) else None
        return batch_of(batch_size, custom_mask=mask)

    (finding,) = audited(sample_batch).batches
    assert (finding.audit, finding.kind, finding.mode, finding.severity) == (
        "misses", "batch falls back", "TARGET_VERIFY", "warning",
    )  # fmt: skip
    assert finding.text == (
        "batches of 2 to 3, 7 requests have no graph: field 'custom_mask' was not captured. Pass "
        "optional_fields=['custom_mask'] to the runner."
    )
    assert "optional" in finding.advice


def test_a_wrong_width_is_reported_once():
    found = audited(lambda mode, batch_size, seed: batch_of(batch_size, width=3))
    (finding,) = found.batches
    assert finding.kind == "batch falls back"
    assert finding.text.startswith("batches of 1 to 8 requests have no graph: ")
    assert "3 tokens" in finding.text
    assert "4 tokens per request" in finding.text
    assert found.text.startswith("0 of 8 batch sizes with a graph")


def test_a_field_that_cannot_be_converted():
    def sample_batch(mode, batch_size, seed):
        return replace(batch_of(batch_size), positions=np.zeros(batch_size * WIDTH) + 0.5)

    (finding,) = audited(sample_batch).batches
    assert (finding.kind, finding.severity) == ("batch is refused", "error")
    assert "'positions'" in finding.text


def test_an_attention_backend_without_graphs():
    target = reference_target("cpu", max_batch_size=2)
    target = replace(target, attention=NoMetadata(EXTEND_V2), forwards={EXTEND_V2: never})
    log = AuditLog()
    audit_dispatch(target, log, modes=[EXTEND_V2], device="cpu")
    (finding,) = log.findings
    assert (finding.kind, finding.severity) == ("batch falls back", "warning")
    assert "NoMetadata does not support DRAFT_EXTEND_V2 graphs" in finding.text
    assert log.checks[0].text == "0 of 2 batch sizes with a graph"


def test_sizes_above_all_sample_batches():
    def sample_batch(mode, batch_size, seed):
        return batch_of(min(batch_size, 3))

    found = audited(sample_batch)
    assert [(f.kind, f.batch_size) for f in found.batches] == [("unreachable size", 8)]
    assert found.batches[0].severity == "warning"
    assert found.batches[0].text == (
        "no batch replays size 8: batches of 1 to 3 requests replay sizes 1, 2, 4."
    )


def test_sizes_above_the_request_pool():
    target = reference_target("cpu", max_batch_size=2)
    target = replace(
        target,
        sizes=replace(target.sizes, max_batch_size=6),
        batch_sizes=[1, 2, 4],
        sample_batch=lambda mode, batch_size, seed: batch_of(batch_size),
    )
    log = AuditLog()
    audit_dispatch(target, log, modes=[VERIFY], device="cpu")
    assert [(f.kind, f.batch_size) for f in log.findings] == [
        ("unreachable size", 4), ("unreachable size", 6),
    ]  # fmt: skip


def test_a_size_that_no_batch_replays():
    found = audited(lambda mode, batch_size, seed: batch_of(8 if batch_size == 4 else batch_size))
    assert found.batches == []  # 3 requests replay size 4
    found = audited(
        lambda mode, batch_size, seed: batch_of(8 if batch_size in (3, 4) else batch_size)
    )
    assert [(f.kind, f.batch_size) for f in found.batches] == [("unreachable size", 4)]


def test_padding_waste_comes_with_a_size_to_capture():
    (finding,) = audited(batch_sizes=[8]).batches
    assert (finding.kind, finding.severity) == ("padding waste", "warning")
    assert finding.text == "44% of rows are pads, at most 88% (1 request at size 8)."
    assert finding.advice == "Capture size 4 too: then 25% of rows are pads."


def test_a_graph_for_every_size_has_no_pads():
    found = audited(batch_sizes=range(1, 9))
    assert (found.batches, found.text) == ([], "8 of 8 batch sizes with a graph; no pads")


def test_the_suggested_size_leaves_the_fewest_pads():
    sizes = gk.BufferSizes(16, 64, HIDDEN, VOCAB, torch.float32)
    (finding,) = audited(sizes=sizes, batch_sizes=[4, 16]).batches
    assert finding.text.startswith("35% of rows are pads")
    assert finding.advice == "Capture size 10 too: then 21% of rows are pads."


def test_sizes_that_double_waste_little():
    found = audited(
        sizes=gk.BufferSizes(64, 64, HIDDEN, VOCAB, torch.float32), batch_sizes=[1, 2, 4, 8, 16, 32]
    )
    assert found.batches == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "forwards", "missing"),
    [
        (EAGLE, [VERIFY], ["DRAFT or MULTI_LAYER_EAGLE", "DRAFT_EXTEND_V2 or MULTI_LAYER_EAGLE"]),
        (EAGLE, [VERIFY, DRAFT], ["DRAFT_EXTEND_V2 or MULTI_LAYER_EAGLE"]),
        (EAGLE, [VERIFY, DRAFT, EXTEND], ["DRAFT_EXTEND_V2 or MULTI_LAYER_EAGLE"]),
        (EAGLE, [VERIFY, DRAFT, EXTEND_V2], []),
        (EAGLE, [VERIFY, LAYERS], []),
        (replace(EAGLE, linear_attention=True), [VERIFY, DRAFT, EXTEND_V2], []),
        (replace(EAGLE, is_draft_worker=True), [DRAFT, EXTEND_V2], []),
        (gk.SpecConfig("EAGLE", 0, 1, 1), [VERIFY], []),
        (gk.SpecConfig("STANDALONE", 3, 1, 4), [VERIFY, LAYERS], ["DRAFT", "DRAFT_EXTEND_V2"]),
        (gk.SpecConfig("NONE", 0, 1, 1), [VERIFY], ["DECODE"]),
        (gk.SpecConfig("NONE", 0, 1, 1), [DECODE], []),
        (CHAIN, [DECODE], ["TARGET_VERIFY"]),
    ],
)
def test_modes_that_the_algorithm_runs(spec, forwards, missing):
    target, log = reference_target("cpu", max_batch_size=1), AuditLog()
    chain = gk.ForwardMode.MULTI_LAYER_EAGLE
    given = {mode: [never] * 3 if mode is chain else never for mode in forwards}
    target = replace(target, spec=spec, forwards=given)
    target = replace(target, batch_sizes=[1], attention=None)
    with warnings.catch_warnings(action="error"):
        audit_dispatch(target, log, device="cpu")
    found = [f for f in log.findings if not f.mode]
    assert [f.text.split(" runs ")[1].split(", and")[0] for f in found] == (
        [" and ".join(missing)] if missing else []
    )
    assert {(f.kind, f.severity) for f in found} <= {("mode without a graph", "note")}


def test_a_target_that_says_what_it_serves_gets_a_warning_for_that_alone():
    """An EAGLE target runs three modes; the drafter belongs to another target."""
    assert audited(spec=EAGLE, served_modes=[VERIFY]).modes == []
    (finding,) = audited(spec=EAGLE, served_modes={VERIFY, DRAFT}).modes
    assert (finding.kind, finding.severity) == ("mode without a graph", "warning")
    assert finding.text == "the target serves DRAFT, but has no forward for it."


@pytest.mark.parametrize(
    ("served", "severity"), [(None, "warning"), ([VERIFY], "warning"), ([DRAFT], "note")]
)
def test_a_batch_without_a_graph_matters_in_a_mode_that_is_served(served, severity):
    found = audited(
        lambda mode, batch_size, seed: batch_of(batch_size, width=3), served_modes=served
    )
    assert [(f.kind, f.severity) for f in found.batches] == [("batch falls back", severity)]


def test_spans():
    assert spans([]) == ""
    assert spans([3]) == "3"
    assert spans([1, 2, 3, 5, 7, 8]) == "1 to 3, 5, 7 to 8"
