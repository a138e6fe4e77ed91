"""Tests of the search for what capturing a forward changes on the host."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit import AuditLog
from graphkit.audit.bits import checksum
from graphkit.audit.host_objects.reachable_objects import ReachableObjects
from graphkit.audit.object_snapshot import ObjectSnapshot
from graphkit.audit.warmup import audit_warmup
from graphkit.engine.kv import MHATokenToKVPool
from small_targets import drafted_llama, llama_target
from tiny_target import VERIFY, VOCAB, log_of, small_target

HIDDEN = 8
LEAK, CACHE, REPLACED = "warm-up leak", "lazy cache", "replaced buffer"
REPLAYED = "and each replay changes it further: it starts from what pad rows left."
COUNT = 0
KEPT: dict[int, torch.Tensor] = {}


class Tiny(nn.Module):
    """Calls ``step(self, inputs)``, which contains the bug, in each forward."""

    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.step = step
        self.steps, self.ready, self.mask, self.last = 0, False, None, None
        self.inner = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
        self.plan = SimpleNamespace(calls=0, inner=SimpleNamespace(calls=0))
        self.log, self.masks = [], {}

    def forward(self, inputs):
        self.step(self, inputs)
        return gk.ForwardOutput(next_token_logits=self.head(self.embedding(inputs.input_ids)))


def audited(forward, **changes):
    """Return kind and text of each finding, and the log."""
    target = small_target(forward, batch_sizes=[1, 4], **changes)
    log = log_of(audit_warmup, target, is_captured=False)
    return [(each.kind, each.text) for each in log.findings], log


def of_model(step, **changes):
    model = Tiny(step)
    return audited(model, weights=model, **changes)[0]


def test_a_step_that_is_counted():
    def step(model, inputs):
        model.steps += 1

    model = Tiny(step)
    found, log = audited(model, weights=model)
    assert found == [(LEAK, "capture changed `Tiny.steps` from 0 to 4: replays do not.")]
    (finding,) = log.findings
    assert (finding.audit, finding.mode, finding.severity) == ("warmup", "TARGET_VERIFY", "error")
    assert (finding.before, finding.after) == ("0", "4")
    assert log.checks[0].text.endswith(": 1 change")


def test_the_host_is_restored():
    def step(model, inputs):
        model.steps += 1
        model.log.append(inputs.num_tokens)
        model.masks[inputs.num_tokens] = inputs.input_ids.clone()
        model.late = model.steps

    model = Tiny(step)
    audited(model, weights=model)
    assert (model.steps, model.log, model.masks) == (0, [], {})
    assert not hasattr(model, "late")


def test_the_host_is_restored_after_a_failed_capture():
    def step(model, inputs):
        model.steps += 1
        inputs.input_ids.sum().item()

    model = Tiny(step)
    with pytest.raises(gk.CaptureError, match="host synchronisation"):
        audited(model)
    assert model.steps == 0


def test_a_buffer_that_only_the_host_counts():
    model = Tiny(lambda model, inputs: np.add(model.view, 1, out=model.view))
    model.view = model.seen.numpy()
    change = "capture changed `Tiny.seen` from int64 [1] [0] to int64 [1] [4]: replays do not."
    assert (LEAK, change) in audited(model)[0]


def test_running_statistics_of_a_batch_norm():
    """Replays update them, too, from what pad rows left."""
    norm = nn.BatchNorm1d(HIDDEN)
    model = Tiny(lambda model, inputs: norm(model.embedding(inputs.input_ids)))
    model.norm = norm
    found = dict.fromkeys(text.rpartition(", and ")[2] for _, text in audited(model)[0])
    assert list(found) == [REPLAYED.removeprefix("and ")]


def test_an_undeclared_buffer():
    model = Tiny(lambda model, inputs: model.seen.add_(1))
    assert audited(model)[0] == [
        (LEAK, f"capture changed `Tiny.seen` from int64 [1] [0] to int64 [1] [4], {REPLAYED}")
    ]


def test_undeclared_state_that_every_capture_leaves_alike_is_a_warning():
    """As in a KV cache: pad rows write their reserved slot."""
    model = Tiny(lambda model, inputs: model.seen.fill_(3))
    assert audited(model)[0] == [
        (
            "undeclared state",
            (
                "capture changed the contents of `Tiny.seen` (int64 [1] [3]), which the graph uses "
                "and the target does not declare: it keeps what pad rows wrote."
            ),
        )
    ]


def test_declared_state_may_change():
    model = Tiny(lambda model, inputs: model.seen.add_(1))
    assert audited(model, weights=model, mutable_state={"seen": model.seen})[0] == []


def test_a_module_within_modules():
    found = of_model(lambda model, inputs: setattr(model.inner[0], "calls", 1))
    assert found == []  # created, and equal for every batch
    model = Tiny(lambda model, inputs: setattr(model.inner[0], "calls", model.inner[0].calls + 1))
    model.inner[0].calls = 0
    assert audited(model)[0] == [
        (LEAK, "capture changed `Tiny.inner.0.calls` from 0 to 4: replays do not.")
    ]


def count_in_plain_objects(model, inputs):
    model.plan.calls += 1
    model.plan.inner.calls += 1


def draw_on_the_host(model, inputs):
    random.random()
    np.random.rand()


CHANGES = {
    "a flag": (
        lambda model, inputs: setattr(model, "ready", True),
        ["changed `Tiny.ready` from False to True: replays do not."],
    ),
    "a buffer": (
        lambda model, inputs: model.seen.add_(1),
        [f"changed `seen` from int64 [1] [0] to int64 [1] [4], {REPLAYED}"],
    ),
    "a weight": (
        lambda model, inputs: model.inner[0].weight.data.mul_(2),
        [f"changed the contents of `inner.0.weight` (float32 [8, 8]), {REPLAYED}"],
    ),
    "a list": (
        lambda model, inputs: model.log.append(None),
        ["changed `Tiny.log` from 0 items to 4 items: replays do not."],
    ),
    "plain objects": (
        count_in_plain_objects,
        [
            "changed `Tiny.plan.calls` from 0 to 4: replays do not.",
            "changed `Tiny.plan.inner.calls` from 0 to 4: replays do not.",
        ],
    ),
    "random numbers": (
        draw_on_the_host,
        [
            "drew random numbers from `random`: replays do not.",
            "drew random numbers from `numpy.random`: replays do not.",
        ],
    ),
}
"""What each forward changes, and how the findings begin."""


@pytest.mark.parametrize(("step", "changes"), CHANGES.values(), ids=CHANGES)
def test_what_each_forward_changes(step, changes):
    assert of_model(step) == [(LEAK, f"capture {change}") for change in changes]


def test_a_cache_that_depends_on_the_batch():
    def step(model, inputs):
        if model.mask is None:
            model.mask = inputs.input_ids.sum()

    ((kind, text),) = of_model(step)
    assert kind == CACHE
    assert text.startswith(
        "capture created `Tiny.mask` (int64 [] 0) from pad rows: every replay reads"
    )


def test_a_cache_by_size():
    def step(model, inputs):
        if inputs.num_tokens not in model.masks:
            model.masks[inputs.num_tokens] = inputs.input_ids.clone()

    found = of_model(step)
    assert [kind for kind, _ in found] == [CACHE, CACHE]
    assert "`Tiny.masks[16]` (int64 [16]" in found[0][1]
    assert "`Tiny.masks[4]` (int64 [4]" in found[1][1]


def test_a_cache_of_constants_is_ignored():
    def step(model, inputs):
        if inputs.num_tokens not in model.masks:
            model.masks[inputs.num_tokens] = torch.arange(inputs.num_tokens)
        if model.mask is None:
            model.mask = ("causal", torch.ones(4, 4).tril())

    model = Tiny(step)
    found, log = audited(model)
    assert found == []
    assert log.checks[0].text.endswith(": 0 changes; ignored 4 caches of constants")


def test_a_kept_result_that_every_replay_writes():
    def step(model, inputs):
        model.last = inputs.input_ids * 2

    assert of_model(step) == []


def test_a_buffer_that_is_replaced():
    def step(model, inputs):
        if len(model.last) < inputs.num_tokens:
            model.last = torch.zeros(inputs.num_tokens)

    model = Tiny(step)
    model.last = torch.zeros(1)
    ((kind, text),) = audited(model)[0]
    assert kind == REPLACED
    assert text == (
        "capture replaced `Tiny.last`, float32 [1] [0.0], with float32 [16]: a graph keeps the "
        "address that it was captured with."
    )


def test_a_generator_of_its_own():
    model = Tiny(lambda model, inputs: model.generator.manual_seed(model.generator.seed() % 100))
    model.generator = torch.Generator()
    ((kind, text),) = audited(model)[0]
    assert (kind, text) == (
        LEAK,
        "capture drew random numbers from `Tiny.generator`: replays do not.",
    )


def plain(inputs):
    return gk.ForwardOutput(next_token_logits=torch.zeros(inputs.num_tokens, VOCAB))


def test_variables_that_a_function_closes_over():
    calls, inside = 0, SimpleNamespace(calls=0)

    def forward(inputs):
        nonlocal calls
        calls += 1
        inside.calls += 1
        return plain(inputs)

    found, _ = audited(forward)
    assert found == [
        (LEAK, "capture changed `forward.calls` from 0 to 4: replays do not."),
        (LEAK, "capture changed `forward.inside.calls` from 0 to 4: replays do not."),
    ]
    assert (calls, inside.calls) == (0, 0)


def counting(inputs):
    global COUNT
    COUNT += 1
    KEPT[inputs.num_tokens] = inputs.input_ids.clone()
    counting.calls += 1
    return plain(inputs)


def test_globals_and_attributes_of_a_function(monkeypatch):
    monkeypatch.setattr(counting, "calls", 0, raising=False)
    found, _ = audited(counting)
    assert {text.split(" from ")[0] for _, text in found} == {
        "capture changed `counting.calls`",
        "capture changed `test_warmup.COUNT`",
    }
    assert (COUNT, counting.calls, KEPT) == (0, 0, {})


class Counting(Tiny):
    def forward(self, inputs):
        global COUNT
        COUNT += 1
        return super().forward(inputs)


class CountingWorker:
    def __call__(self, inputs):
        global COUNT
        COUNT += 1
        return plain(inputs)


@pytest.mark.parametrize("forward", [Counting(lambda model, inputs: None), CountingWorker()])
def test_globals_of_a_class(forward):
    found, _ = audited(forward)
    assert found == [(LEAK, "capture changed `test_warmup.COUNT` from 0 to 4: replays do not.")]
    assert COUNT == 0


def test_methods_and_partial_functions():
    class Worker:
        def __init__(self):
            self.calls = 0

        def forward(self, inputs, options):
            self.calls += 1
            options["calls"] += 1
            return plain(inputs)

    found, _ = audited(partial(Worker().forward, options={"calls": 0}))
    assert sorted(text for _, text in found) == [
        "capture changed `Worker.calls` from 0 to 4: replays do not.",
        "capture changed `partial.keywords['options']['calls']` from 0 to 4: replays do not.",
    ]


def test_state_of_attention_backends_and_pools_is_ignored():
    """A capture writes slot 0 of every pool, declared or not."""
    target = replace(llama_target(drafted_llama(None), has_chain=False), mutable_state=None)
    log = AuditLog()
    with target.runner(VERIFY, device="cpu") as runner:
        audit_warmup(target, runner, log)
    assert log.findings == []


def test_pools_that_a_forward_writes_itself():
    pool = MHATokenToKVPool(32, 1, torch.float32, 1, HIDDEN, 1, "cpu")

    def forward(inputs):
        rows = inputs.positions[:, None, None].expand(-1, 1, HIDDEN).float() + 1
        pool.set_kv_buffer(0, inputs.out_cache_loc, rows, rows)
        return plain(inputs)

    assert audited(forward)[0] == []
    assert pool.get_key_buffer(0)[0].any()


def test_objects_that_refer_to_each_other_are_entered_once():
    one, other = SimpleNamespace(calls=0), SimpleNamespace()
    one.other, other.one = other, one
    names = [
        container.name(key)
        for container, values in ReachableObjects({"one": one}).entries
        for key in values
    ]
    assert sorted(names) == ["one.calls", "one.other", "one.other.one"]


def test_long_lists_are_compared_by_length():
    model = SimpleNamespace(words=[str(i) for i in range(1000)])
    before = ObjectSnapshot({"model": model}, {})
    model.words.append("more")
    (change,) = before.changes(ObjectSnapshot({"model": model}, {}))
    assert (change.before.text, change.after.text) == ("1,000 items", "1,001 items")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24, dtype=torch.int64).view(2, 3, 4),
        torch.arange(7, dtype=torch.uint8),
        torch.arange(12).view(3, 4).t(),
        torch.zeros(5, dtype=torch.bool),
        torch.randn(33).bfloat16(),
        torch.zeros(0),
        torch.ones(()),
    ],
    ids=str,
)
def test_a_checksum_depends_on_every_bit_and_its_position(tensor):
    assert checksum(tensor) == checksum(tensor.clone())
    seen = {checksum(tensor)}
    for i in range(tensor.numel()):
        other = tensor.clone()
        other.flatten()[i] = ~other.flatten()[i] if tensor.dtype is torch.bool else 99
        changed = other.contiguous().view(-1)
        changed[i] = True if tensor.dtype is torch.bool else 99
        seen.add(checksum(changed.view(tensor.shape)))
    assert len(seen) == 1 + tensor.numel()


def test_a_checksum_depends_on_the_order_of_its_chunks():
    tensor = torch.zeros((1 << 20) + 8, dtype=torch.int64)
    tensor[0], tensor[1 << 20] = 1, 2
    other = tensor.clone()
    other[0], other[1 << 20] = 2, 1
    assert checksum(tensor) != checksum(other)
