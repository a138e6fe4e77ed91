"""``gk.capture(pad_values=)``, and pad rows that write into tensors of the caller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import graphkit as gk

X, SLOTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([5, 3, 7])


class Writer:
    """Writes rows into a pool at slots."""

    def __init__(self):
        self.pools = [torch.zeros(16, 4), torch.zeros(16, 4)]

    def __call__(self, x, slots):
        self.pools[1][slots] = 2 * x
        return x + self.pools[1][slots]

    def add(self, x, slots):
        return self.pools[0].index_add_(0, slots, x)[slots]

    def rows(self, x):
        self.pools[0][: len(x)] = x
        return x + 1


@pytest.mark.parametrize(
    ("x", "slots"), [(X, SLOTS), (torch.zeros(3, 4), SLOTS), (X[:1], SLOTS[:1])]
)
@pytest.mark.parametrize("is_declared", [False, True])
def test_pads_that_write_where_a_row_may_write_are_refused(x, slots, is_declared):
    writer = Writer()
    state, name = {}, r"Writer\.pools\[1\]"
    if is_declared:
        state, name = {"kv": writer.pools[1]}, "kv"
    place = int(slots.min())
    with pytest.raises(gk.ConfigError, match=rf"pad rows write into `{name}` at \[{place}\]") as e:
        gk.capture(writer, (x, slots), batch_sizes=[1, 4], mutable_state=state)
    assert e.value.field == "pad_values"
    assert "pad_values={'slots': ...}" in str(e.value)
    assert not writer.pools[1].any()


@pytest.mark.parametrize("pads", [{"slots": 7}, {"x": 1.0}, (0.0, None)])
def test_a_pad_value_that_a_row_of_the_example_has_is_refused(pads):
    with pytest.raises(gk.ConfigError, match="Pads hold pad_values"):
        gk.capture(Writer(), (X, SLOTS), batch_sizes=[4], pad_values=pads)


def test_state_that_sums_up_must_be_declared(capture):
    fn = Writer().add
    with pytest.raises(gk.OutputError, match=r"writes `Writer\.pools\[0\]`: pass it as mutable"):
        gk.capture(fn, (X, SLOTS), batch_sizes=[4], pad_values={"slots": 0})
    state = {"pool": fn.__self__.pools[0]}
    captured = capture(fn, (X, SLOTS), pad_values={"slots": 0}, mutable_state=state)
    captured(X, SLOTS)
    assert torch.equal(captured(X, SLOTS), 2 * X)


def test_the_audit_does_not_judge_rows_that_it_does_not_know(capture):
    writer = Writer()
    captured = capture(
        writer, (X, SLOTS), pad_values={"slots": 0}, mutable_state={"pool": writer.pools[1]}
    )
    found = gk.audit_target(captured.target, device="cpu", only=["pads"]).findings
    assert not found, found


def test_every_row_of_the_example_keeps_its_place():
    example = torch.randn(9, 4), torch.arange(2, 11)
    with pytest.raises(gk.ConfigError, match=r"at \[10\]"):
        gk.capture(Writer(), example, batch_sizes=[4], pad_values={"slots": 10})


def test_other_writes_of_pads_are_refused():
    for fn in (Writer().add, Writer().rows):
        example = (X, SLOTS) if fn.__name__ == "add" else X
        with pytest.raises(gk.ConfigError, match=r"pad rows write into `Writer\.pools\[0\]`"):
            gk.capture(fn, example, batch_sizes=[4])


@dataclass
class Batch:
    """Arguments in a dataclass; also pad values."""

    x: torch.Tensor
    slots: torch.Tensor


@pytest.mark.parametrize(
    ("form", "pads"),
    [
        (tuple, {"slots": 0}), (tuple, (None, 0)), (tuple, {"slots": torch.tensor(0)}),
        (tuple, {"slots": np.int64(0), "x": np.ones(1)}),
        (dict, {"x": -1.5, "slots": 0}), (Batch, Batch(None, 0)),
    ],
)  # fmt: skip
def test_pads_have_a_place_of_their_own(capture, form, pads):
    writer = Writer()
    state = {"pool": writer.pools[1]}
    fn = writer if form is not Batch else lambda batch: writer(batch.x, batch.slots)
    example = {"x": X, "slots": SLOTS} if form is dict else (X, SLOTS)
    example = Batch(X, SLOTS) if form is Batch else example
    captured = capture(fn, example, pad_values=pads, mutable_state=state)
    assert not writer.pools[1].any()
    new = {"x": torch.ones(2, 4), "slots": torch.tensor([3, 9])}
    got = captured(Batch(**new)) if form is Batch else captured(**new)
    assert torch.equal(got, torch.full((2, 4), 3.0))
    assert torch.equal(captured.runner.buffers.view(4).slots, torch.tensor([3, 9, 0, 0]))
    assert writer.pools[1][1:].nonzero()[:, 0].unique().tolist() == [2, 8]


def test_writes_that_do_not_follow_rows_are_accepted(capture):
    calls, table = torch.zeros(1), torch.zeros(4)

    def fn(x):
        calls.add_(1)
        table.copy_(torch.ones(4))
        return x + table

    capture(fn, X)
    assert not calls.any()


@pytest.mark.parametrize(
    ("pads", "text"),
    [
        ({"y": 0}, "names 'y', but the example has the arguments x, slots"),
        ((0, 0, 0), "names 2, but"),
        (5, "names '5', but"),
        ({"slots": 1.5}, r"pad_values\['slots'\] of Writer is 1.5, expected an int from"),
        ({"slots": 2**70}, "expected an int"),
        ({"slots": torch.ones(2)}, "expected an int"),
        ({"x": "a"}, "is 'a', expected a number of torch.float32"),
        ({"x": 1e39}, "expected a number of torch.float32"),
        ({"x": float("nan")}, "expected a number of torch.float32"),
    ],
)
def test_wrong_pad_values_are_refused(pads, text):
    with pytest.raises(gk.ConfigError, match=text) as caught:
        gk.capture(Writer(), (X, SLOTS), batch_sizes=[4], pad_values=pads)
    assert caught.value.field == "pad_values"


def test_the_only_argument_may_have_a_number(capture):
    captured = capture(lambda flags: ~flags, torch.ones(3, dtype=torch.bool), pad_values=True)
    captured(torch.zeros(1, dtype=torch.bool))
    assert captured.runner.buffers.view(4).flags.tolist() == [False, True, True, True]
