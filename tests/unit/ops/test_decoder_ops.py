"""Ops of decoder layers: gradients and refusals. ``test_agreement`` compares their values."""

from __future__ import annotations

import pytest
import torch

from graphkit import InputError
from graphkit.ops.decoder import add_rms_norm, rms_norm, rotated_heads, silu_and_mul
from graphkit.ops.registration import OPS

ROWS, WIDTH = 3, 8
FREQUENCIES = torch.tensor([1.0, 0.1])
DIFFERENTIABLE = {
    rms_norm: ([ROWS, WIDTH], [WIDTH], 1e-6),
    add_rms_norm: ([ROWS, WIDTH], [ROWS, WIDTH], [WIDTH], 1e-6),
    silu_and_mul: ([ROWS, WIDTH],),
    rotated_heads: ([ROWS, 16], torch.arange(ROWS), FREQUENCIES, 2, 1, [4], [4], 1e-6),
}


def gradients(run, shapes):
    """Return results and gradients of random arguments, which replace their shapes."""
    generator = torch.Generator().manual_seed(2)
    args = [
        torch.randn(each, generator=generator).requires_grad_() if isinstance(each, list) else each
        for each in shapes
    ]
    results = run(*args)
    results = results if isinstance(results, tuple) else (results,)
    sum((each * each).sum() for each in results).backward()
    of_args = [each.grad for each in args if isinstance(each, torch.Tensor) and each.requires_grad]
    return [*results, *of_args]


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.__name__)
def test_gradients_are_those_of_the_reference(op):
    got = gradients(op, DIFFERENTIABLE[op])
    expected = gradients(OPS[op.__name__].reference, DIFFERENTIABLE[op])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("count", [1, 3])
def test_parts_are_added_and_rounded_before(count):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    parts, residual, weight = random(count, ROWS, 16), random(ROWS, 16).bfloat16(), random(16)
    rows = parts.sum(0).bfloat16()
    got = add_rms_norm(parts, residual, weight.bfloat16(), 1e-6)
    expected = add_rms_norm(rows, residual, weight.bfloat16(), 1e-6)
    assert all(map(torch.equal, got, expected))
    rest = torch.arange(ROWS), FREQUENCIES, 2, 1
    got = rotated_heads(parts, *rest, dtype=torch.bfloat16)
    assert all(map(torch.equal, got, rotated_heads(rows, *rest)))


@pytest.mark.parametrize("rows", [1, 3])
def test_rotated_heads_share_no_memory(rows):
    """A slice of one row is contiguous, so it is a view unless it is copied."""
    found = rotated_heads(torch.ones(rows, 16), torch.arange(rows), FREQUENCIES, 2, 1)
    assert all(each.is_contiguous() for each in found)
    assert len({each.untyped_storage().data_ptr() for each in found}) == 3


def test_results_that_are_not_used_need_no_gradient():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    normed, _total = add_rms_norm(x, x.detach(), torch.ones(WIDTH), 1e-6)
    normed.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: rms_norm(torch.ones(2, 4), torch.ones(3), 0.0),
            r"weight is \[3\].*expected \[H\]",
        ),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(4), -1.0), "eps is -1.0, expected at least"),
        (
            lambda: add_rms_norm(torch.ones(1, 3, 4), torch.ones(2, 4), torch.ones(4), 0.0),
            r"x is \[1, 3, 4\].*expected \[S, T, H\] = \[1, 2, 4\]",
        ),
        (lambda: silu_and_mul(torch.ones(2, 5)), "expected an even number of columns"),
        (
            lambda: rotated_heads(torch.ones(2, 9), torch.arange(2), FREQUENCIES, 2, 1),
            r"qkv is \[2, 9\].*expected .*= \[2, 16\]",
        ),
    ],
)
def test_refusals(call, text):
    with pytest.raises(InputError, match=text):
        call()
