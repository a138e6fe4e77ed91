"""Which memory a tensor of this process holds."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from graphkit.audit.live_tensors import LiveTensors


def test_a_tensor_holds_its_storage_and_no_more():
    storage = torch.zeros(1 << 20)
    view, live = storage[100:200], LiveTensors()
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes
    assert live.contain(begin)
    assert live.contain(view.data_ptr() - 4)
    assert live.contain(end - 1)
    assert not live.contain(1 << 12)


def test_a_view_inside_does_not_hide_what_comes_after_it():
    outer = torch.zeros(1000)
    inner = torch.frombuffer(outer.numpy(), dtype=torch.float32, count=10, offset=400)
    assert inner.data_ptr() > outer.data_ptr()
    assert LiveTensors().contain(inner.data_ptr() + 400)


def test_a_tensor_that_died_holds_nothing():
    tensor = torch.zeros(8 << 20)  # so large that nothing else is put there
    begin = tensor.data_ptr()
    assert LiveTensors().contain(begin)
    del tensor
    gc.collect()
    assert not LiveTensors().contain(begin)


@pytest.mark.parametrize(
    "other", [lambda: torch.zeros(4, 4).to_sparse(), lambda: torch.zeros(4, device="meta")]
)
def test_tensors_without_memory_are_passed_over(other):
    kept = other()
    LiveTensors().contain(1)
    assert kept is not None


def test_a_frozen_collector_leaves_nothing_certain():
    code = (
        "import gc; from graphkit.audit.live_tensors import LiveTensors\n"
        "assert not LiveTensors().contain(1); gc.freeze(); assert LiveTensors().contain(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
