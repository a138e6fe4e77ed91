"""``gk.capture`` refuses functions whose rows follow other rows, whatever the example has."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import graphkit as gk
from function_models import rows


def int8(x):
    scale = x.abs().max() / 127
    return (x / scale).round().to(torch.int8).float() * scale


MIXES = {
    "largest": lambda x: x / x.abs().max(),
    "int8": int8,
    "mean": lambda x: x - x.mean(0),
    "clipped": lambda x: x.clamp(max=1.2 * x.abs().mean()),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "sort": lambda x: x.sort(0).values,
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "statistics": lambda x: (x - x.mean(0)) / (x.std(0, correction=0) + 1e-5),
}
EXAMPLES = {
    "random": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "zeros": torch.zeros(3, 4),
    "ones": torch.ones(3, 4),
    "one row": torch.arange(4.0)[None],
}


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("fn", MIXES)
def test_rows_that_follow_others_are_refused(fn, example):
    with pytest.raises(gk.OutputError, match="in the other rows") as caught:
        gk.capture(MIXES[fn], EXAMPLES[example], batch_sizes=[1, 4])
    assert "other values of argument `x`" in str(caught.value)


@pytest.mark.parametrize("value", [0, 1])
def test_integers_and_booleans_vary_too(value):
    flags = torch.full((3, 4), value)
    for fn, example in (
        (lambda x: x.flip(0), flags),
        (lambda x: x ^ x.any(), flags.bool()),
        (lambda x: x & x.all(0), flags.bool()),
    ):
        with pytest.raises(gk.OutputError, match="argument `x`"):
            gk.capture(fn, example, batch_sizes=[4])


def test_the_argument_that_rows_follow_is_named():
    with pytest.raises(gk.OutputError, match=r"row 0 of `sum` is .* other values of argument `b`"):
        gk.capture(lambda a, b: {"a": a, "sum": a + b.sum()}, rows(), batch_sizes=[4])


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda x: x + torch.rand(4), "draws random numbers"),
        (lambda x: x + 0 * torch.rand_like(x), "draws random numbers"),
        (lambda x: nn.functional.dropout(x), "draws random numbers"),
        (lambda x: x * random.random(), "two calls with the same arguments differ"),
    ],
)
def test_random_functions_are_refused(fn, text):
    state = torch.get_rng_state()
    with pytest.raises(gk.OutputError, match=f"{text}.*[Rr]andom numbers must be arguments"):
        gk.capture(fn, rows()[0], batch_sizes=[4])
    assert torch.equal(torch.get_rng_state(), state)


TABLE = torch.arange(20.0).view(5, 4)


@pytest.mark.parametrize(
    ("fn", "example"),
    [
        (lambda i: TABLE[i], torch.tensor([1, 4, 0])),
        (lambda i: TABLE[i + 4], torch.zeros(3, dtype=torch.int64)),
        (lambda i: TABLE[i.long()], torch.zeros(3)),
        (lambda x, n: x.gather(1, n[:, None] - 1), (rows()[0], torch.tensor([1, 4, 2]))),
        (
            lambda x, mask: x.masked_fill(~mask, -torch.inf).softmax(-1),
            (rows()[0], torch.ones(3, 4, dtype=torch.bool)),
        ),
        (lambda x, bias: (x + bias).softmax(-1), (rows()[0], torch.tensor([[0, -torch.inf]] * 3)
            .repeat(1, 2))),
        (lambda x, bias: x + bias, (rows()[0], torch.full((3, 4), torch.finfo().min))),
        (lambda x: x.log(), torch.rand(3, 4)),
        (lambda position: position[:, None] * torch.arange(4), torch.arange(3)),
        (lambda x: x + torch.arange(len(x))[:, None], rows()[0]),
        (lambda x: x @ x.transpose(1, 2), torch.randn(3, 16, 16, dtype=torch.bfloat16)),
    ],
)  # fmt: skip
def test_independent_rows_are_accepted(capture, fn, example):
    given = example if isinstance(example, tuple) else (example,)
    assert torch.equal(capture(fn, example)(*given), fn(*given))


def test_one_row_at_a_time_has_no_pads(capture):
    captured = capture(lambda x: x - x.mean(0), rows()[0], batch_sizes=[1])
    assert not captured(torch.ones(1, 4)).any()
