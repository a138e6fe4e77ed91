"""Names of a runner's memory, and records of graphs by runners and ``capture_target``."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.errors import ReplayError, SizeError
from graphkit.runners.known_memory import buffer_records, memory_names

VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE
SIZE = 2


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self):
        self.tensor = torch.ones(1)


@pytest.fixture
def runner(target):
    with target.runner(VERIFY, batch_sizes=[SIZE], device="cpu") as runner:
        yield runner


def state_names(runner, attention, mutable_state=None):
    return memory_names(runner.buffers, mutable_state or {}, attention, None)["state"]


def test_tensors_of_an_attention_backend_are_named_by_its_attributes(runner):
    mine, deep = torch.ones(1), torch.ones(2)
    model = nn.Linear(2, 2)
    model.scratch = torch.ones(5)
    attention = SimpleNamespace(
        workspace=mine, layers=[torch.ones(3), "no tensor", torch.ones(4)], mode="paged",
        pool=SimpleNamespace(inner=SimpleNamespace(deep=deep, further=SimpleNamespace(x=mine))),
        model=model, slotted=Slotted(),
    )  # fmt: skip
    names = state_names(runner, attention)
    assert set(names) == {
        "attention.workspace", "attention.layers.0", "attention.layers.2",
        "attention.pool.inner.deep",
    }  # fmt: skip
    assert names["attention.pool.inner.deep"] is deep


def test_a_name_in_mutable_state_takes_precedence_over_the_attention_backends(runner):
    cache = torch.ones(8)
    names = state_names(runner, SimpleNamespace(cache=cache), {"kv.0": cache})
    assert list(names) == ["kv.0"]
    assert state_names(runner, None) == {}


def test_inputs_weights_and_the_mailbox_have_names(runner):
    model = nn.BatchNorm1d(2)
    names = memory_names(runner.buffers, {}, None, model)
    assert set(names) == {"weight", "state", "input", "mailbox"}
    assert set(names["weight"]) == {
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip
    assert {"input_ids", "seq_lens"} <= set(names["input"])
    assert {"ring", "sequence", "entry"} <= set(names["mailbox"])


def test_every_field_of_the_inputs_is_a_buffer_record(runner):
    records = {record.field: record for record in buffer_records(runner.buffers)}
    tensors = runner.buffers.arena.tensors
    assert set(records) == set(tensors)
    for name, record in records.items():
        assert record.address == tensors[name].data_ptr()
        assert record.shape == tuple(tensors[name].shape)
        assert record.size == tensors[name].nbytes
        assert not record.is_bound
        assert record.meaning
    ids, lengths = records["input_ids"], records["seq_lens"]
    assert (ids.dtype, ids.axis, ids.shape, ids.pad) == ("int64", "token", (8,), 0.0)
    assert (lengths.dtype, lengths.axis, lengths.shape) == ("int32", "request", (2,))
    assert lengths.pad == 1.0


def test_a_bound_field_uses_the_given_storage(target):
    ids = torch.zeros(SIZE, dtype=torch.int64)
    runner = gk.DecodeRunner(
        lambda inputs: None, spec=target.spec, sizes=target.sizes, batch_sizes=[SIZE],
        device="cpu", bound_fields={"input_ids": ids},
    )  # fmt: skip
    records = {record.field: record for record in buffer_records(runner.buffers)}
    assert [name for name, record in records.items() if record.is_bound] == ["input_ids"]
    assert records["input_ids"].address == ids.data_ptr()


def test_a_runner_inspects_a_graph_by_size(target, runner):
    runner.capture()
    batch = target.batch(VERIFY, SIZE, 1)
    record = runner.inspect(SIZE, weights=target.weights, replay=lambda: runner.replay(batch))
    assert (record.name, record.mode, record.batch_size) == ("TARGET_VERIFY 2", "TARGET_VERIFY", 2)
    assert "test_known_memory.py" in record.captured_at
    assert len(record.nodes) == runner.graphs[SIZE].num_nodes
    assert record.timing.replays == 3
    assert runner.inspect(SIZE).timing is None


def test_inspection_changes_no_output(target, runner):
    runner.capture()
    batch = target.batch(VERIFY, SIZE, 1)
    before = runner.replay(batch, clone=True)
    runner.inspect(SIZE, replay=lambda: runner.replay(batch))
    assert torch.equal(runner.replay(batch).next_token_logits, before.next_token_logits)


def test_a_size_that_was_not_captured_is_refused(runner):
    runner.capture()
    with pytest.raises(
        SizeError, match=r"batch size 1 was not captured: captured are \[2\]"
    ) as caught:
        runner.inspect(1)
    assert (caught.value.batch_size, caught.value.largest) == (1, 2)


def test_only_a_captured_runner_is_inspected(runner):
    with pytest.raises(
        ReplayError, match=r"inspect needs a captured runner, but .* planned\. Call capture"
    ):
        runner.inspect(SIZE)
    runner.capture()
    runner.close()
    with pytest.raises(
        ReplayError, match="inspect needs a captured runner, but this one is closed"
    ):
        runner.inspect(SIZE)


def capture(target, **options):
    forwards = {mode: target.forwards[mode] for mode in (VERIFY, DECODE)}
    only = replace(target, forwards=forwards, engine=None)
    return gk.capture_target(only, device="cpu", **options)


@pytest.fixture(scope="module")
def inspected(target):
    return capture(target, batch_sizes=[1, SIZE], inspect=True)


def test_capture_target_inspects_every_graph(inspected):
    captured = [(graph.mode, graph.batch_size) for graph in inspected.graphs]
    assert captured == [(mode, size) for mode in ("TARGET_VERIFY", "DECODE") for size in (1, SIZE)]
    sizes = [size for mode in inspected.modes for size in mode.sizes]
    for graph, size in zip(inspected.graphs, sizes, strict=True):
        assert len(graph.nodes) == size.num_nodes
        assert all(node.module for node in graph.nodes)
        assert {node.duration_us is None for node in graph.nodes} == {False}
        assert graph.timing.bound_by == "order"
    assert inspected.mismatches == ()


def test_a_mode_record_has_buffers_and_replays(inspected):
    for mode in inspected.modes:
        assert {buffer.field for buffer in mode.buffers} >= {"input_ids", "seq_lens"}
        assert set(mode.stats.replays_by_size) == {1, SIZE}
        assert mode.stats.replays == sum(mode.stats.replays_by_size.values())


def test_capture_target_inspects_only_on_request(target):
    record = capture(target, batch_sizes=[SIZE], modes=[DECODE])
    assert record.graphs == ()
    assert record.modes[0].buffers


def test_inspection_restores_the_state(target):
    calls = torch.zeros(1, dtype=torch.int64)

    def counted(inputs):
        calls.add_(1)
        return target.forwards[DECODE](inputs)

    state = {**target.mutable_state, "calls": calls}
    counting = replace(target, forwards={DECODE: counted}, mutable_state=state, engine=None)
    record = gk.capture_target(counting, device="cpu", batch_sizes=[SIZE], inspect=True)
    assert record.graphs[0].timing.replays == 3
    assert calls.item() == 0
