"""Tests of the search for pad rows and earlier batches that affect live rows or state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit import AuditLog
from graphkit.audit.pads.audit import audit_pads
from graphkit.audit.runs.equal_state_runs import live_sizes
from graphkit.graphs import SizeTable
from no_metadata import NoMetadata
from tiny_target import SLOTS, VERIFY, VOCAB, WIDTH, log_of, small_target

HIDDEN = 8
LEAK, STRAY = "leaking pad row", "write outside live slots"
STALE, ORDER = "stale rows of a larger batch", "rows depend on batch order"
SIZES, NONDETERMINISTIC = "sizes interfere", "nondeterministic step"


class Tiny(nn.Module):
    """Calls ``mix(hidden, inputs)``, which contains the bug, between its two layers."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.mix = mix

    def forward(self, inputs):
        hidden = self.embedding(inputs.input_ids) + inputs.positions[:, None] / 64
        return gk.ForwardOutput(next_token_logits=self.head(self.mix(hidden, inputs)))


def sample_batch(_mode, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(SLOTS - 1, generator=generator) + 1
    return gk.TargetVerifyInputs(
        req_pool_indices=1 + torch.randperm(8, generator=generator)[:batch_size],
        seq_lens=torch.randint(1, 9, (batch_size,), generator=generator).int(),
        input_ids=torch.randint(1, VOCAB, (batch_size * WIDTH,), generator=generator),
        positions=torch.randint(0, 32, (batch_size * WIDTH,), generator=generator),
        out_cache_loc=order[: batch_size * WIDTH],
    )


def pads_target(mix, **changes):
    return small_target(Tiny(mix), **{"sample_batch": sample_batch, "batch_sizes": [4], **changes})


def audited(mix, *, mode=VERIFY, batch_sizes=(1, 4), page_size=1, **changes):
    """Return kind and size of each finding in a model, and the log."""
    sizes = gk.BufferSizes(4, 64, HIDDEN, VOCAB, torch.float32, page_size=page_size)
    facts = {"sizes": sizes, "batch_sizes": list(batch_sizes), **changes}
    log = log_of(audit_pads, pads_target(mix, **facts), mode=mode)
    return {(each.kind, each.batch_size) for each in log.findings}, log


def unchanged(hidden, inputs):
    return hidden


def storing(cache, slots=lambda inputs: inputs.out_cache_loc):
    """Return a mix that writes its rows to a cache, and reads them."""

    def mix(hidden, inputs):
        cache.index_copy_(0, slots(inputs), hidden.to(cache.dtype))
        return hidden + cache[inputs.out_cache_loc].to(hidden)

    return mix


def test_positions_of_a_draft_stay_in_its_context():
    """Draft steps count positions up, so pad rows stay that far below the last one."""
    steps, context = 4, 32
    positions = nn.Embedding(context, HIDDEN)

    def forward(inputs):
        hidden = positions(inputs.positions)
        return gk.ForwardOutput(next_token_logits=hidden.repeat(1, 4), hidden_states=hidden)

    def draft_batch(_mode, batch_size, seed):
        generator = torch.Generator().manual_seed(seed)
        return gk.DraftInputs(
            req_pool_indices=1 + torch.arange(batch_size),
            seq_lens=torch.full((batch_size,), 9, dtype=torch.int32),
            positions=torch.full((batch_size,), 9),
            out_cache_loc=1 + torch.arange(batch_size * steps),
            topk_p=torch.ones(batch_size, 1),
            topk_index=torch.randint(0, VOCAB, (batch_size, 1), generator=generator),
            hidden_states=torch.randn(batch_size, HIDDEN, generator=generator),
        )

    found, _ = audited(
        None, mode=gk.ForwardMode.DRAFT, batch_sizes=[4],
        spec=gk.SpecConfig("EAGLE", steps, 1, steps + 1),
        sizes=gk.BufferSizes(4, context, HIDDEN, VOCAB, torch.float32),
        forwards={gk.ForwardMode.DRAFT: forward}, sample_batch=draft_batch,
    )  # fmt: skip
    assert found == set()


def test_a_mean_over_the_batch_leaks():
    found, log = audited(lambda hidden, inputs: hidden + hidden.mean(0))
    assert found == {(LEAK, 4)}
    (finding,) = log.findings
    assert (finding.field, finding.row, finding.request) == ("next_token_logits", 0, 0)
    assert (finding.audit, finding.mode, finding.severity) == ("pads", "TARGET_VERIFY", "error")
    assert finding.text.startswith(
        f"row 0 of next_token_logits (request 0 of 1) is {finding.after} instead of "
        f"{finding.before} with the largest ids in pad rows."
    )
    assert finding.text.endswith(" 8 more replays went wrong like this.")
    assert "batch" in finding.advice


def test_masking_by_multiplication_leaks_the_reserved_slot():
    """0 * NaN is NaN, also in a batch without pad rows."""
    cache = torch.zeros(SLOTS, HIDDEN)

    def mix(hidden, inputs):
        cache.index_copy_(0, inputs.out_cache_loc, hidden)
        return hidden + 0 * cache[0]

    found, log = audited(mix, batch_sizes=(1, 4), mutable_state={"cache": cache})
    assert found == {(LEAK, 1), (LEAK, 4)}
    assert "with nan in pad rows and reserved slots" in log.findings[0].text
    assert log.findings[0].after == "nan"


def test_the_reserved_row_of_a_request_table_leaks():
    table = torch.zeros(9, 16, dtype=torch.int32)
    table[1:] = torch.arange(1, 9)[:, None]
    found, log = audited(
        lambda hidden, inputs: hidden + table[inputs.req_pool_indices].float().mean(),
        mutable_state={"table": table},
    )
    assert found == {(LEAK, 4)}
    assert (
        "with slots of another request in the reserved row of a request table"
        in log.findings[0].text
    )
    assert not table[0].any()


@pytest.mark.parametrize(
    ("shape", "page_size"),
    [((SLOTS, HIDDEN), 1), ((SLOTS // 4, 4, HIDDEN), 4), ((2, SLOTS, HIDDEN), 1)],
    ids=["slots", "pages", "keys and values"],
)
def test_a_pad_row_that_writes_another_slot_is_reported(shape, page_size):
    pool = torch.zeros(shape)
    cache = pool.view(-1, SLOTS, HIDDEN)[-1]

    def mix(hidden, inputs):
        slots = inputs.out_cache_loc.where(inputs.out_cache_loc > 0, SLOTS - 1)
        cache.index_copy_(0, slots, hidden)
        return hidden

    found, log = audited(mix, mutable_state={"pool": pool}, page_size=page_size)
    assert found == {(STRAY, 4)}
    (finding,) = log.findings
    assert (finding.field, finding.row, finding.request) == ("pool", SLOTS - 1, None)
    assert finding.text.startswith(
        f"row {SLOTS - 1} of state `pool` changes from 0 to {finding.after} "
    )
    assert "but belongs to no request of the batch (1 live request)." in finding.text
    assert not pool.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_writes_to_own_slots_are_correct_in_any_layout_and_dtype(dtype):
    cache = torch.ones(SLOTS, HIDDEN).to(dtype)
    raw = cache.view(torch.uint8)

    def mix(hidden, inputs):
        rows = hidden.to(dtype).view(torch.uint8)
        raw.index_copy_(0, inputs.out_cache_loc, rows)
        return hidden

    counter, by_request = torch.zeros(()), torch.zeros(9, 2)

    def counting(hidden, inputs):
        counter.add_(1)
        by_request.index_fill_(0, inputs.req_pool_indices, 5.0)
        return mix(hidden, inputs) + counter

    state = {"cache": cache, "counter": counter, "by_request": by_request}
    found, _ = audited(counting, mutable_state=state)
    assert found == set()
    assert counter == 0
    assert (cache.float() == 1).all()


class PlansOnlyLiveRows(NoMetadata):
    """Writes the live slots of each batch into a buffer, and does not pad its tail."""

    def __init__(self):
        super().__init__()
        self.slots = torch.zeros(SLOTS, dtype=torch.int64)

    def before_replay(self, mode, batch, padded_batch_size):
        self.slots[: batch.num_tokens] = batch.out_cache_loc


def test_a_write_to_stale_slots_of_a_larger_batch_is_reported():
    cache, plan = torch.zeros(SLOTS, HIDDEN), PlansOnlyLiveRows()
    mix = storing(cache, lambda inputs: plan.slots[: inputs.num_tokens])
    found, log = audited(mix, mutable_state={"cache": cache}, attention=plan)
    assert (STRAY, 4) in found
    (finding,) = (each for each in log.findings if each.kind == STRAY)
    assert " after a batch of 4 requests, but belongs to no request of the batch" in finding.text
    assert "Set page_size in BufferSizes" in finding.advice


def test_a_flag_of_one_size_interferes_with_another():
    flag = torch.zeros(1)

    def mix(hidden, inputs):
        hidden = hidden + flag
        flag.fill_(len(hidden))
        return hidden

    assert audited(mix)[0] == {(SIZES, 1), (SIZES, 4)}


def test_rows_computed_from_their_index_depend_on_batch_order():
    found, log = audited(lambda hidden, inputs: hidden + torch.arange(len(hidden))[:, None] / 9)
    assert found == {(ORDER, 4)}
    assert "with requests in the order [1, 0]" in log.findings[0].text


def stray(cache):
    def mix(hidden, inputs):
        hidden = hidden * 2
        cache.index_copy_(0, inputs.out_cache_loc, hidden)
        cache.index_copy_(0, inputs.out_cache_loc.where(inputs.out_cache_loc > 0, 63), hidden)
        return hidden

    return mix


def never_reset(largest):
    def mix(hidden, inputs):
        largest.copy_(torch.maximum(largest, inputs.positions.max()))
        return hidden + largest

    return mix


def counting(counter):
    return lambda hidden, inputs: hidden * 2 + counter.add_(1)


@pytest.mark.parametrize(
    ("mix_of", "kind", "kernel", "offset"),
    [
        (stray, STRAY, "index_copy_", 4),
        (never_reset, STALE, "maximum", 2),
        (counting, NONDETERMINISTIC, "add", 1),
    ],
)
def test_a_finding_names_the_node_and_its_line(mix_of, kind, kernel, offset):
    memory = torch.zeros(SLOTS, HIDDEN) if mix_of is stray else torch.zeros(HIDDEN)
    state = {"cache": memory} if mix_of is stray else None
    _, log = audited(mix_of(memory), mutable_state=state)
    (finding,) = (each for each in log.findings if (each.kind, each.batch_size) == (kind, 4))
    line = mix_of.__code__.co_firstlineno + offset
    assert finding.kernel == kernel
    assert finding.source.split()[0].endswith(f"test_pads.py:{line}")
    assert f"is `{kernel}`." in finding.text or kind == STRAY


def test_rounding_by_row_index_is_no_finding():
    found, _ = audited(
        lambda hidden, inputs: hidden + torch.arange(len(hidden))[:, None] % 3 * 1e-7
    )
    assert found == set()


def test_undeclared_state_makes_replays_nondeterministic():
    found, log = audited(counting(torch.zeros(HIDDEN)))
    assert found == {(NONDETERMINISTIC, 1), (NONDETERMINISTIC, 4)}
    assert " in a second replay of the same batch." in log.findings[0].text


def test_random_numbers_are_the_same_in_every_replay():
    state = torch.get_rng_state()
    assert audited(lambda hidden, inputs: hidden + torch.rand_like(hidden))[0] == set()
    assert torch.equal(torch.get_rng_state(), state)


def test_runner_and_state_are_restored():
    cache = torch.arange(float(SLOTS))[:, None].repeat(1, HIDDEN)
    before = cache.clone()
    target = pads_target(storing(cache), mutable_state={"cache": cache})
    with target.runner(VERIFY, device="cpu") as runner:
        runner.capture()
        batch = target.batch(VERIFY, 2, 0)
        expected = runner.replay(batch, clone=True).next_token_logits
        cache.copy_(before)
        runner.shadow = "padded"
        audit_pads(target, runner, AuditLog())
        assert runner.shadow == "padded"
        assert torch.equal(cache, before)
        runner.shadow = None
        assert torch.equal(runner.replay(batch).next_token_logits, expected)


def test_a_runner_that_is_not_captured_is_refused():
    target = pads_target(unchanged)
    with pytest.raises(gk.ReplayError, match="needs a captured runner"):
        audit_pads(target, target.runner(VERIFY, device="cpu"), AuditLog())


@pytest.mark.parametrize(
    ("sizes", "lives"),
    [
        ([1], [1]),
        ([7, 8], [*range(1, 9)]),
        ([8, 10], [1, 5, 9, 10]),
        ([60, 64], [1, 32, 61, 63, 64]),
    ],
)
def test_large_sizes_are_tried_with_few_and_many_requests(sizes, lives):
    assert live_sizes(SizeTable(max(sizes), sizes), max(sizes)) == lives


def test_no_more_requests_are_tried_than_a_batch_may_have():
    table = SizeTable(5, multiple_of=4)
    assert live_sizes(table, 8) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("scale", "multiple", "severity"),
    [(1e-7, 1.0, "note"), (1e-3, 1.0, "error"), (1e-3, 1e4, "note")],
)
def test_a_difference_within_rounding_is_a_note_and_the_tolerance_widens_it(
    scale, multiple, severity
):
    """As of a grouped matrix product, which splits its work by the rows of the batch."""
    target = pads_target(lambda rows, _i: rows + scale * rows.abs().clamp(max=9).amax())
    log = log_of(audit_pads, target, tolerance=multiple)
    assert {each.severity for each in log.findings} == {severity}
    if severity == "note":
        assert {each.kind for each in log.findings} == {"rounding depends on other rows"}
        assert all(each.before != each.after for each in log.findings)
        assert all(" ulp of float32; the padded and the" in each.text for each in log.findings)


def test_a_leak_below_the_largest_rounding_is_found_in_a_step_that_rounds_less():
    """The leak changes logits by some 20 ulp of bfloat16, in which the model computes."""

    def mix(hidden, inputs):
        return hidden + 0.5 * (inputs.input_ids == VOCAB - 1).any()

    found, log = audited(mix, sizes=gk.BufferSizes(4, 64, HIDDEN, VOCAB, torch.bfloat16))
    assert found == {(LEAK, 4)}
    assert " ulp of bfloat16; the padded and the unpadded step differ by 0 ulp." in (
        log.findings[0].text
    )


def test_a_step_that_rounds_in_changing_order_is_still_searched_for_leaks():
    counter = torch.zeros(())

    def rounding(hidden):
        return hidden * (1 + 1e-7 * (counter.add_(1) % 3))

    found, log = audited(lambda hidden, inputs: rounding(hidden), batch_sizes=(4,))
    assert found == {("nondeterministic rounding", 4)}
    assert log.findings[0].severity == "note"
    found, _ = audited(lambda hidden, inputs: rounding(hidden + hidden.mean(0)), batch_sizes=(4,))
    assert found == {("nondeterministic rounding", 4), (LEAK, 4)}
