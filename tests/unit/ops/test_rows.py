"""Ops that copy rows against torch, and what they refuse."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from graphkit import InputError
from graphkit.ops.rows import gather_rows, scatter_rows

CASES = runpy.run_path(str(Path(__file__).with_name("row_cases.py")))
CPU = torch.device("cpu")
ROWS, ONE = torch.zeros(4, 3), torch.zeros(1, dtype=torch.int64)


def test_gathered_rows_are_those_of_the_index():
    for source, index in CASES["gathers"](CPU):
        got = gather_rows(source, index)
        assert torch.equal(got, source[index.long()])
        assert got.is_contiguous()


def test_scattered_rows_are_at_the_index():
    for targets, sources, index in CASES["scatters"](CPU):
        expected = [target.clone() for target in targets]
        for target, source in zip(expected, sources, strict=True):
            target[index.long()] = source
        scatter_rows(targets, sources, index)
        assert all(map(torch.equal, targets, expected))


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_the_schema_and_the_fake_are_those_of_the_op(op):
    overload = getattr(torch.ops.graphkit, f"{op}_rows").default
    for args in list(CASES[f"{op}s"](CPU))[::9]:
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
