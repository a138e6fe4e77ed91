"""Before capture, the misses audit says which batches have no graph and which graphs no batch."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.attention import AttentionBackend
from graphkit.audit import AuditLog
from graphkit.audit.misses import audit_misses, spans
from graphkit.reference import reference_target
from graphkit.targets import RUNNERS

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
DRAFT, EXTEND = gk.ForwardMode.DRAFT, gk.ForwardMode.DRAFT_EXTEND
EXTEND_V2, LAYERS = gk.ForwardMode.DRAFT_EXTEND_V2, gk.ForwardMode.MULTI_LAYER_EAGLE
VOCAB, HIDDEN, WIDTH, REQUESTS = 32, 8, 4, 8
CHAIN = gk.SpecConfig("NGRAM", WIDTH - 1, 1, WIDTH)
EAGLE = gk.SpecConfig("EAGLE", WIDTH - 1, 1, WIDTH)


def never(inputs):
    raise AssertionError("nothing runs")


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
    """What the audit found in the batches of a mode, and among the modes."""

    batches: list
    modes: list
    text: str


def audited(sample_batch=lambda mode, batch_size, seed: batch_of(batch_size), **changes):
    facts = {
        "name": "tiny",
        "spec": CHAIN,
        "sizes": gk.BufferSizes(REQUESTS, 64, HIDDEN, VOCAB, torch.float32),
        "forwards": {VERIFY: never},
        "sample_batch": sample_batch,
        "batch_sizes": [1, 2, 4, 8],
    }
    log = AuditLog()
    audit_misses(gk.CaptureTarget(**{**facts, **changes}), log, device="cpu")
    found = log.findings
    return Found([f for f in found if f.mode], [f for f in found if not f.mode], log.checks[0].text)


@pytest.mark.parametrize("topk", [1, 2])
def test_the_reference_target_has_no_finding(topk):
    log = AuditLog()
    audit_misses(reference_target("cpu", topk=topk), log, device="cpu")
    assert log.findings == []
    assert [check.mode for check in log.checks[:-1]] != []
    assert {check.mode for check in log.checks} == {"", *(mode.name for mode in RUNNERS)}
    for check in log.checks[:-1]:
        assert check.text == (
            "8 live sizes, 8 with a graph; 16% of all rows are pads, 38% at worst "
            "(5 live at size 8)"
        )


def test_a_sound_target_has_no_finding():
    found = audited()
    assert (found.batches, found.modes) == ([], [])


def test_only_the_modes_that_were_asked_for():
    target, log = reference_target("cpu", max_batch_size=1), AuditLog()
    audit_misses(target, log, modes=[DECODE], device="cpu")
    assert [check.mode for check in log.checks] == ["DECODE"]


def test_a_field_that_was_not_captured():
    def sample_batch(mode, batch_size, seed):
        mask = np.ones((batch_size, WIDTH, WIDTH), dtype=bool) if batch_size in (2, 3, 7) else None
        return batch_of(batch_size, custom_mask=mask)

    (finding,) = audited(sample_batch).batches
    assert (finding.audit, finding.kind, finding.mode, finding.severity) == (
        "misses", "batch falls back", "TARGET_VERIFY", "error",
    )  # fmt: skip
    assert finding.text == (
        "batches of 2 to 3, 7 requests have no graph: field 'custom_mask' was not captured. Pass "
        "optional_fields=['custom_mask'] to the runner."
    )
    assert "optional" in finding.advice


def test_a_wrong_width_is_told_once():
    found = audited(lambda mode, batch_size, seed: batch_of(batch_size, width=3))
    (finding,) = found.batches
    assert finding.kind == "batch falls back"
    assert finding.text == (
        "batches of 1 to 8 requests have no graph: 3 tokens in 1 requests; captured are 4 tokens "
        "per request."
    )
    assert found.text.startswith("8 live sizes, 0 with a graph")


def test_a_field_that_cannot_be_taken():
    def sample_batch(mode, batch_size, seed):
        return replace(batch_of(batch_size), positions=np.zeros(batch_size * WIDTH) + 0.5)

    (finding,) = audited(sample_batch).batches
    assert finding.kind == "batch is refused"
    assert "'positions'" in finding.text


def test_an_attention_backend_without_graphs():
    class WithoutGraphs(AttentionBackend):
        def supports(self, mode):
            return False

        def init_state(self, sizes, max_tokens):
            pass

        def metadata(self, mode, inputs):
            return None

    target = reference_target("cpu", max_batch_size=2)
    target = replace(target, attention=WithoutGraphs(), forwards={EXTEND_V2: never})
    log = AuditLog()
    audit_misses(target, log, modes=[EXTEND_V2], device="cpu")
    (finding,) = log.findings
    assert (finding.kind, finding.severity) == ("batch falls back", "warning")
    assert "WithoutGraphs does not support DRAFT_EXTEND_V2 graphs" in finding.text
    assert log.checks[0].text == "2 live sizes, 0 with a graph"


def test_sizes_beyond_what_is_ever_sampled():
    def sample_batch(mode, batch_size, seed):
        return batch_of(min(batch_size, 3))

    found = audited(sample_batch)
    assert [(f.kind, f.batch_size) for f in found.batches] == [("unreachable size", 8)]
    assert found.batches[0].severity == "warning"
    assert found.batches[0].text == (
        "no batch runs at size 8: there are batches of 1 to 3 requests, and they run at 1, 2, 4."
    )


def test_sizes_beyond_the_request_pool():
    target = reference_target("cpu", max_batch_size=2)
    target = replace(
        target,
        sizes=replace(target.sizes, max_batch_size=6),
        batch_sizes=[1, 2, 4],
        sample_batch=lambda mode, batch_size, seed: batch_of(batch_size),
    )
    log = AuditLog()
    audit_misses(target, log, modes=[VERIFY], device="cpu")
    assert [(f.kind, f.batch_size) for f in log.findings] == [
        ("unreachable size", 4), ("unreachable size", 6),
    ]  # fmt: skip


def test_a_size_that_nothing_between_needs():
    found = audited(lambda mode, batch_size, seed: batch_of(8 if batch_size == 4 else batch_size))
    assert found.batches == []  # 3 runs at 4 all the same
    found = audited(
        lambda mode, batch_size, seed: batch_of(8 if batch_size in (3, 4) else batch_size)
    )
    assert [(f.kind, f.batch_size) for f in found.batches] == [("unreachable size", 4)]


def test_padding_waste_and_what_would_help():
    (finding,) = audited(batch_sizes=[8]).batches
    assert (finding.kind, finding.severity) == ("padding waste", "warning")
    assert finding.text == "44% of all rows are pads, 88% at worst (1 live at size 8)."
    assert finding.advice == "Capture 4 as well: then it is 25%."


def test_a_graph_for_every_size_has_no_pads():
    found = audited(batch_sizes=range(1, 9))
    assert (found.batches, found.text) == ([], "8 live sizes, 8 with a graph; no pads")


def test_the_best_size_to_add_helps_the_batches_below_it():
    sizes = gk.BufferSizes(16, 64, HIDDEN, VOCAB, torch.float32)
    (finding,) = audited(sizes=sizes, batch_sizes=[4, 16]).batches
    assert finding.text.startswith("35% of all rows are pads")
    assert finding.advice == "Capture 10 as well: then it is 21%."


def test_sizes_that_double_are_no_waste():
    found = audited(
        sizes=gk.BufferSizes(64, 64, HIDDEN, VOCAB, torch.float32), batch_sizes=[1, 2, 4, 8, 16, 32]
    )
    assert found.batches == []


@pytest.mark.parametrize(
    ("spec", "forwards", "missing"),
    [
        (EAGLE, [VERIFY], ["DRAFT or MULTI_LAYER_EAGLE", "DRAFT_EXTEND_V2 or MULTI_LAYER_EAGLE"]),
        (EAGLE, [VERIFY, DRAFT], ["DRAFT_EXTEND_V2 or MULTI_LAYER_EAGLE"]),
        (EAGLE, [VERIFY, DRAFT, EXTEND], ["DRAFT_EXTEND_V2 or MULTI_LAYER_EAGLE"]),
        (EAGLE, [VERIFY, DRAFT, EXTEND_V2], []),
        (EAGLE, [VERIFY, LAYERS], []),
        (replace(EAGLE, linear_attention=True), [VERIFY, DRAFT, EXTEND], []),
        (replace(EAGLE, is_draft_worker=True), [DRAFT, EXTEND_V2], []),
        (gk.SpecConfig("EAGLE", 0, 1, 1), [VERIFY], []),
        (gk.SpecConfig("STANDALONE", 3, 1, 4), [VERIFY, LAYERS], ["DRAFT", "DRAFT_EXTEND_V2"]),
        (gk.SpecConfig("NONE", 0, 1, 1), [VERIFY], ["DECODE"]),
        (gk.SpecConfig("NONE", 0, 1, 1), [DECODE], []),
        (CHAIN, [DECODE], ["TARGET_VERIFY"]),
    ],
)
def test_modes_that_the_algorithm_would_dispatch(spec, forwards, missing):
    target, log = reference_target("cpu", max_batch_size=1), AuditLog()
    target = replace(target, spec=spec, forwards=dict.fromkeys(forwards, [never] * 3))
    target = replace(target, batch_sizes=[1], attention=None)
    with warnings.catch_warnings(action="error"):
        audit_misses(target, log, device="cpu")
    found = [f for f in log.findings if not f.mode]
    assert [f.text.split(" runs ")[1].split(",")[0] for f in found] == missing
    assert {(f.kind, f.severity) for f in found} <= {("mode without a graph", "warning")}


def test_spans():
    assert spans([]) == ""
    assert spans([3]) == "3"
    assert spans([1, 2, 3, 5, 7, 8]) == "1 to 3, 5, 7 to 8"
