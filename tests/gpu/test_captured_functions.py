"""``gk.capture`` on CUDA: models of torch and transformers, and arguments on either device."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from function_models import MODELS, called, scaled

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_itself_and_has_no_error(name):
    torch.manual_seed(0)
    model, example = MODELS[name]("cuda")
    with (
        torch.backends.cudnn.flags(enabled=True, allow_tf32=False),
        gk.capture(model, example, batch_sizes=[1, 4]) as captured,
    ):
        assert captured.record.backend == "cuda"
        for rows in ([1], [2, 0], [0, 1, 2], [0, 1, 2] * 2):
            expected = called(model, example, rows)
            torch.testing.assert_close(
                called(captured, example, rows), expected, rtol=1e-3, atol=1e-4
            )
        assert captured.stats.replays == 3
        assert captured.inspect(4).nodes
        report = gk.audit_target(captured.target, batch_sizes=[4], device="cuda")
    assert "error" not in {each.severity for each in report.findings}


@pytest.mark.parametrize(
    "fn", [lambda x: x / x.abs().max(), lambda x: x - x.mean(0), lambda x: x + torch.rand_like(x)]
)
@pytest.mark.parametrize("value", [None, 0, 1])
def test_rows_that_follow_others_are_refused(fn, value):
    example = torch.randn(3, 4) if value is None else torch.full((3, 4), float(value))
    with pytest.raises(gk.OutputError, match=r"in the other rows|draws random numbers"):
        gk.capture(fn, example.cuda(), batch_sizes=[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_pads_have_a_slot_of_their_own(dtype):
    pool = torch.zeros(16, 4, device="cuda", dtype=dtype)

    def store(x, slots):
        pool[slots] = x.to(dtype)
        return pool[slots].float()

    example = 9 * torch.rand(3, 4, device="cuda") + 1, torch.tensor([5, 3, 7], device="cuda")
    with pytest.raises(gk.ConfigError, match=r"pad rows write into `kv` at \[3\]"):
        gk.capture(store, example, batch_sizes=[4], mutable_state={"kv": pool})
    with gk.capture(
        store, example, batch_sizes=[4], mutable_state={"kv": pool}, pad_values={"slots": 0}
    ) as captured:
        assert not pool.any()
        captured(torch.full((1, 4), 2.0), torch.tensor([9]))
    assert pool[1:].float().nonzero()[:, 0].unique().tolist() == [8]


@pytest.fixture(params=["cpu", "cuda"])
def captured(request):
    example = torch.randn(3, 4), torch.ones(3)
    example = tuple(each.to(request.param) for each in example)
    with gk.capture(scaled, example, batch_sizes=[4], device="cuda") as captured:
        yield captured


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_arguments_may_be_on_either_device(captured, device):
    x, scale = torch.randn(3, 4), torch.rand(3)
    got = captured(x.to(device), scale.to(device))
    assert got.is_cuda
    assert torch.equal(got.cpu(), scaled(x, scale))
    assert torch.equal(captured(x.numpy(), scale.to(device)).cpu(), scaled(x, scale))


def test_strided_device_tensors_are_read_right(captured):
    wide, scale = torch.randn(4, 8, device="cuda"), torch.rand(1, device="cuda").expand(4)
    for _ in range(20):  # the copies are released while replays are in flight
        got = captured(wide[:, ::2], scale)
        assert torch.equal(got, scaled(wide[:, ::2], scale))


def test_a_staged_batch_takes_what_the_example_had(captured):
    x, scale = torch.randn(2, 4), torch.rand(2)
    staged = captured.stage(2)
    staged.x, staged.scale = x.cuda(), scale.cuda()
    assert torch.equal(staged.replay().cpu(), scaled(x, scale))


def test_a_result_is_the_next_argument(captured):
    x, scale = torch.randn(3, 4, device="cuda"), torch.full((3,), 2.0, device="cuda")
    got = x
    for _ in range(5):
        got = captured.replay(got, scale)
    assert torch.equal(got, x * 32)


def test_an_example_on_another_device_is_refused():
    with pytest.raises(gk.ConfigError, match="is on cuda:0, but the function is to run on cpu"):
        gk.capture(torch.relu, torch.zeros(2, 3, device="cuda"), batch_sizes=[2], device="cpu")
