"""The recorder captures and refuses what a CUDA graph captures and refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import graphkit as gk
from capture_cases import CASES, REPLAYS, make_inputs
from graphkit.errors import CaptureCause
from graphkit.graphs import CaptureFailure, RecorderBackend
from graphkit.graphs.capture_failure import advice_at, as_capture_failure, exception_chain
from graphkit.graphs.capture_rules import CaptureRulesMode

SYNC = CaptureCause.HOST_SYNCHRONISATION


def capture(function):
    backend = RecorderBackend()
    with backend.session():
        return backend.capture(function)


def cause_of(function):
    try:
        capture(function).replay()
    except CaptureFailure as failure:
        return failure.cause
    return None


def test_the_table_has_distinct_cases():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert len(CASES) >= 80


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_recorder_agrees_with_cuda(case):
    inputs = make_inputs("cpu")
    assert cause_of(lambda: case.function(inputs)) is case.cause


@pytest.mark.parametrize("case", REPLAYS, ids=lambda case: case.name)
def test_replays_of_the_recorder_agree_with_cuda(case):
    assert case.function(RecorderBackend()) == case.expected


def test_one_hot_equals_that_of_torch_and_follows_its_indices():
    ids = torch.tensor([[2, 0], [1, 3]])
    graph = capture(lambda: nn.functional.one_hot(ids, num_classes=5))
    ids.copy_(torch.tensor([[4, 4], [0, 2]]))
    graph.replay()
    assert torch.equal(graph.output, nn.functional.one_hot(ids, num_classes=5))


DEVICE = "cpu"


def test_only_a_call_that_spells_the_cpu_means_the_host():
    """A device from a variable is the recorder's own device."""
    x = torch.ones(3)
    assert cause_of(lambda: x.to(DEVICE)) is None
    assert cause_of(lambda: x.to(device=x.device)) is None
    assert cause_of(lambda: x.to(torch.ones(2, device="cpu").device)) is SYNC
    assert cause_of(lambda: torch.ones(3, device="cpu").to(x.device)) is SYNC
    assert cause_of(lambda: (torch.ones(3, device="cpu"), x.to(x.device))) is None
    assert cause_of(lambda: torch.ones(3, device=DEVICE).to(x.device)) is None


def test_a_literal_of_another_call_does_not_mean_the_host():
    x, move = torch.ones(3), torch.Tensor.to

    def function():
        to = move
        names = ("cpu", "cuda")
        return to(x, DEVICE), names

    assert cause_of(function) is None


def test_an_empty_upload_is_a_device_tensor():
    x = torch.ones(3)
    assert cause_of(lambda: torch.tensor([], device=x.device).to(x.device)) is None
    assert cause_of(lambda: x.new_tensor([]).tolist()) is SYNC


def test_operations_on_other_devices_are_not_blamed():
    """A failed capture is diagnosed by the operations of its device alone."""
    host, device = torch.ones(3), torch.ones(3, device="meta")
    with CaptureRulesMode("meta"):
        assert host.sum().item() == 3
        with pytest.raises(CaptureFailure, match="aten::nonzero"):
            device.nonzero()
        with pytest.raises(CaptureFailure, match="aten::_to_copy"):
            host.to("meta")


def test_host_tensors_of_one_capture_are_not_known_to_the_next():
    kept = []
    capture(lambda: kept.append(torch.tensor([1.0, 2.0])))
    assert cause_of(lambda: kept[0].to(kept[0].device)) is None
    assert cause_of(lambda: kept[0].tolist()) is SYNC


def test_a_result_of_host_and_device_tensors_belongs_to_the_device():
    x = torch.ones(2)
    assert cause_of(lambda: (x * torch.tensor(2.0)).to(x.device)) is None
    assert cause_of(lambda: (x * torch.tensor(2.0)).tolist()) is SYNC


class Uploads(nn.Module):
    def forward(self, x):
        return x + torch.tensor([1.0, 2.0], device=x.device)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Uploads(), "torch.tensor"),
        (lambda x: x.new_tensor([1, 2]), "Tensor.new_tensor"),
        (lambda x: x.to("cpu"), "Tensor.to"),
        (lambda x: torch.from_numpy(np.ones(2)).to(x.device), "Tensor.to"),
        (lambda x: x[[0, 1]], "aten::index.Tensor"),
    ],
)
def test_a_refused_copy_names_its_function_line_and_module(call, name):
    x = torch.ones(2)

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = call if isinstance(call, nn.Module) else None

        def forward(self, x):
            return call(x)

    model = Calls()
    with pytest.raises(CaptureFailure) as caught:
        capture(lambda: model(x))
    assert caught.value.where.startswith(f"{name} at {__file__}:")
    module = "Calls.inner" if isinstance(call, nn.Module) else "Calls"
    assert caught.value.where.endswith(f"` in module {module}")


class Raises(nn.Module):
    def forward(self, inputs):
        raise NotImplementedError("no kernel")


class Reads(nn.Module):
    def forward(self, inputs):
        return gk.ForwardOutput(inputs.positions.sum().item())


@pytest.mark.parametrize("kind", [Raises, Reads])
def test_a_capture_error_names_the_module(kind):
    model = nn.Sequential(nn.Identity(), kind())
    runner = gk.TargetVerifyRunner(
        model,
        spec=gk.SpecConfig("EAGLE", num_steps=3, topk=1, num_draft_tokens=4),
        sizes=gk.BufferSizes(2, 16, 8, 8, torch.float32),
        batch_sizes=[2],
        backend=RecorderBackend(),
    )
    with pytest.raises(gk.CaptureError, match=r"` in module Sequential\.1\b") as caught:
        runner.capture()
    assert " in module Sequential.1" in caught.value.where


def test_an_error_of_cuda_names_the_module():
    """CUDA raises within the operation, without a dispatch mode that knows the stack."""
    message = "CUDA error: operation not permitted when stream is capturing"

    class Fails(nn.Module):
        def forward(self):
            raise RuntimeError(message)

    with pytest.raises(RuntimeError) as caught:
        nn.ModuleList([Fails()])[0]()
    failure = as_capture_failure(caught.value)
    assert failure.cause is SYNC
    assert failure.where.endswith(f"` in module Fails (RuntimeError: {message})")


def test_a_generator_of_its_own_is_an_unsupported_operation():
    message = "Attempt to increase offset for a CUDA generator not in capture mode."
    assert as_capture_failure(RuntimeError(message)).cause is CaptureCause.UNSUPPORTED_OP


@pytest.mark.parametrize(
    ("cause", "where", "is_special"),
    [
        ("DATA_DEPENDENT_SHAPE", "aten::nonzero at {} in module M.layers.0.mlp.experts", True),
        ("HOST_SYNCHRONISATION", "{} in module M.mlp.experts (RuntimeError: x)", True),
        ("HOST_SYNCHRONISATION", "{} in module M.layers.0.mlp.experts_router", False),
        ("OUT_OF_MEMORY", "{} in module M.layers.0.mlp.experts", False),
    ],
)
@pytest.mark.parametrize("package", ["transformers", "own"])
def test_experts_of_transformers_have_advice_of_their_own(cause, where, is_special, package):
    cause, line = CaptureCause[cause], f"/lib/{package}/moe.py:3 `hit.nonzero()`"
    advice = advice_at(cause, where.format(line))
    is_special = is_special and package == "transformers"
    assert ('experts_implementation="batched_mm"' in advice) == is_special
    assert (advice == cause.value) != is_special


def test_an_exception_that_is_its_own_cause_ends_the_chain():
    error, context = ValueError("twice"), KeyError("before")
    error.__cause__ = error
    assert [*exception_chain(error)] == [error]
    error.__cause__, context.__cause__ = context, error
    assert [*exception_chain(error)] == [error, context]
