"""Tests of the search for memory that belongs to a tensor."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphkit.audit.live_tensors import LiveTensors
from graphkit.graphs import tracked_objects
from graphkit.graphs.tracked_objects import _thawed as thawed


def test_a_storage_contains_its_addresses_only():
    storage = torch.zeros(1 << 20)
    view, live = storage[100:200], LiveTensors()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes
    assert live.contain(begin)
    assert live.contain(view.data_ptr() - 4)
    assert live.contain(end - 1)
    assert not live.contain(1 << 12)


def test_a_storage_within_another_does_not_hide_the_rest_of_it():
    outer = torch.zeros(1000)
    inner = torch.frombuffer(outer.numpy(), dtype=torch.float32, count=10, offset=400)
    assert inner.data_ptr() > outer.data_ptr()
    assert LiveTensors().contain(inner.data_ptr() + 400)


def test_memory_of_a_deleted_tensor_is_not_contained():
    tensor = torch.zeros(8 << 20)  # too large for its memory to be used again at once
    begin = tensor.data_ptr()
    assert LiveTensors().contain(begin)
    del tensor
    gc.collect()
    assert not LiveTensors().contain(begin)


class Holder:
    """An object whose attributes are tensors."""

    def __init__(self, count):
        for number in range(count):
            setattr(self, f"tensor_{number}", torch.zeros(4))


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(4)


@pytest.mark.parametrize(
    "other",
    [lambda: torch.zeros(4, 4).to_sparse(), lambda: torch.zeros(4, device="meta"), fake_tensor],
)
def test_tensors_without_memory_are_ignored(other):
    kept = other()
    LiveTensors().contain(1)
    assert kept is not None


@pytest.mark.slow
def test_frozen_tensors_are_found_and_stay_frozen(monkeypatch):
    holder = Holder(1)
    gc.freeze()
    address = holder.tensor_0.data_ptr()
    assert not LiveTensors().contain(address)  # tests hide frozen objects
    monkeypatch.setattr(tracked_objects, "_thawed", thawed)
    before = gc.get_freeze_count()
    live = LiveTensors()
    assert live.contain(address)
    assert live.names([address]) == ["Holder.tensor_0"]
    assert gc.get_freeze_count() >= before > 0


def test_a_search_freezes_nothing_by_itself(monkeypatch):
    monkeypatch.setattr(tracked_objects, "_thawed", thawed)
    gc.unfreeze()
    try:
        assert not LiveTensors().contain(1)
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()


@pytest.mark.parametrize("count", [1, 40])
def test_one_search_of_the_process_names_all_tensors(count, monkeypatch):
    holder, calls, search = Holder(count), [], gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *args: calls.append(args) or search(*args))
    addresses = [tensor.data_ptr() for tensor in vars(holder).values()]
    names = LiveTensors().names(addresses)
    assert names == [f"Holder.tensor_{number}" for number in range(count)]
    assert len(calls) == 2  # holders of tensors, and owners of their attributes


def test_names_of_tensors_that_forwards_reach_and_of_memory_without_a_tensor():
    weight, loose = torch.zeros(4), [torch.zeros(4)]
    live = LiveTensors({"forward": lambda: weight})
    names = live.names([weight.data_ptr(), 1, loose[0].data_ptr()])
    assert names == ["forward.weight", "", "float32 [4]"]
