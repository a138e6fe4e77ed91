"""Ops that copy rows against torch, on every device, and what they refuse."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from graphkit import InputError
from graphkit.ops.kernels import rows as kernels
from graphkit.ops.rows import gather_rows, scatter_rows
from op_devices import CPU, CUDA, INTERPRETER, by

INDICES = (torch.int32, torch.int64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool)
SHAPES = ((), (1,), (3,), (64,), (96,), (2304,), (2, 3, 4), (0,))
"""Shapes of a row: no dimension, widths that are no powers of two, several dimensions."""


def random(generator, shape, dtype):
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def gathers():
    """Yield sources and indices: no, one and several rows, and sources of any strides."""
    generator = torch.Generator().manual_seed(1)
    for dtype, shape, count in product(DTYPES, SHAPES, (0, 1, 3, 8)):
        index = torch.randint(0, 5, (count,), generator=generator).to(INDICES[count % 2])
        yield random(generator, (5, *shape), dtype), index
    index = torch.tensor([4, 0, 4])
    yield random(generator, (96, 5), torch.bfloat16).t(), index
    yield random(generator, (5, 4, 40), torch.float32)[:, 1, ::2], index
    yield random(generator, (4, 3, 5), torch.float32).transpose(0, 2), index
    yield random(generator, (0, 7), torch.float32), index[:0]


def scatters():
    """Yield targets, sources and indices: one tensor or several of different rows."""
    generator = torch.Generator().manual_seed(2)
    several = [((dtype, shape),) for dtype, shape in product(DTYPES, SHAPES)]
    several += [
        ((torch.int64, (1,)), (torch.bfloat16, (2304,))),
        ((torch.float32, (4,)), (torch.int64, (4,)), (torch.float16, (96,)), (torch.bool, ())),
        (),
    ]
    for kinds, count in product(several, (0, 1, 3, 8)):
        index = torch.randperm(9, generator=generator)[:count].to(INDICES[count % 2])
        targets = [random(generator, (9, *shape), dtype) for dtype, shape in kinds]
        sources = [random(generator, (count, *shape), dtype) for dtype, shape in kinds]
        yield targets, sources, index
    spaced = random(generator, (2, 6, 40), torch.float32)[:, ::2, ::2].flatten(0, 1)
    yield [torch.zeros(9, 20)], [spaced], torch.arange(6)


ROWS, ONE = torch.zeros(4, 3), torch.zeros(1, dtype=torch.int64)


@pytest.fixture(params=[512, 4096], ids=["several blocks", "one block"])
def block(request, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_BLOCK", request.param)


@by(CPU, INTERPRETER, CUDA)
def test_gathered_rows_are_those_of_the_index(run, block):
    for source, index in gathers():
        got = run(gather_rows, source, index)
        assert torch.equal(got, source[index.long()])
        assert got.is_contiguous()


@by(CPU, INTERPRETER, CUDA)
def test_scattered_rows_are_at_the_index(run, block):
    for targets, sources, index in scatters():
        expected = [target.clone() for target in targets]
        for target, source in zip(expected, sources, strict=True):
            target[index.long()] = source
        run(scatter_rows, targets, sources, index)
        assert all(map(torch.equal, targets, expected))


@by(INTERPRETER, CUDA)
def test_rows_outside_are_the_nearest_or_dropped(run):
    source, outside = torch.arange(8.0).view(4, 2), torch.tensor([-1, 1, 4, 2**40])
    assert torch.equal(run(gather_rows, source, outside), source[[0, 1, 3, 3]])
    target = torch.zeros(4, 2)
    run(scatter_rows, [target], [source], outside)
    assert target.tolist() == [[0, 0], [2, 3], [0, 0], [0, 0]]


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_the_schema_and_the_fake_are_those_of_the_op(op):
    overload = getattr(torch.ops.graphkit, f"{op}_rows").default
    for args in list({"gather": gathers, "scatter": scatters}[op]())[::9]:
        torch.library.opcheck(overload, args, test_utils=("test_schema", "test_faketensor"))


def test_gradients_are_those_of_the_index():
    source = torch.randn(4, 3, requires_grad=True)
    gather_rows(source, torch.tensor([2, 2, 0])).sum().backward()
    assert source.grad.tolist() == [[1] * 3, [0] * 3, [2] * 3, [0] * 3]


def test_a_written_tensor_does_not_become_part_of_a_graph():
    target, source = torch.zeros(2, 3), torch.ones(1, 3, requires_grad=True)
    scatter_rows([target], [source], ONE)
    assert not target.requires_grad
    assert target.tolist() == [[1] * 3, [0] * 3]


@pytest.mark.parametrize("row", [-1, 4])
def test_an_index_outside_the_rows_is_an_error_on_the_cpu(row):
    with pytest.raises(IndexError):
        gather_rows(ROWS, ONE + row)
    with pytest.raises(IndexError):
        scatter_rows([ROWS.clone()], [ROWS[:1]], ONE + row)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: gather_rows(ROWS, ONE.float()), r"index is \[1\] float32.*int32 or int64"),
        (lambda: gather_rows(ROWS[:0], ONE), r"source is \[0, 3\].*at least one row for the 1"),
        (
            lambda: gather_rows(ROWS.to(torch.complex128), ONE),
            "complex128, expected at most 8",
        ),
        (lambda: scatter_rows([ROWS], [], ONE), "sources has 0 tensors, expected 1"),
        (lambda: scatter_rows([ROWS.t()], [ROWS[:1]], ONE), "expected contiguous tensors of"),
        (
            lambda: scatter_rows([ROWS, ROWS[1:]], [ROWS[:1], ROWS[:1]], ONE),
            r"targets has \[3, 3\] .*tensors of \[4\] rows",
        ),
        (
            lambda: scatter_rows([ROWS], [ROWS], ONE),
            r"sources has \[4, 3\] .*expected \[1, 3\] float32",
        ),
        (lambda: scatter_rows([ROWS], [ROWS[:1].half()], ONE), r"float16 .*expected .*float32"),
        (lambda: scatter_rows([ROWS[0, 0]], [ROWS[0, 0]], ONE), r"targets has \[\] float32"),
    ],
)
def test_refusals(call, text):
    with pytest.raises(InputError, match=text):
        call()
