"""Which values may stand for a field, and what the refusal of the others says."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from graphkit.buffers import validate_field
from graphkit.errors import InputError

CPU = torch.device("cpu")
ROWS = 2
GOOD = {
    "req_pool_indices": torch.tensor([3, 1]),
    "seq_lens": torch.tensor([5, 6], dtype=torch.int32),
    "custom_mask": torch.eye(4, dtype=torch.bool).repeat(2, 1, 1),
    "input_embeds": torch.arange(64.0).view(8, 8),
    "mrope_positions": torch.arange(24).view(3, 8),
}


@pytest.fixture(scope="session")
def take(verify_layouts):
    def take(name, value):
        layout = verify_layouts[name]
        return validate_field(layout, value, 8 if layout.capacity == 16 else ROWS, CPU)

    return take


@pytest.mark.parametrize("name", GOOD)
def test_the_fields_own_dtype_is_taken_as_it_is(take, name):
    given = GOOD[name]
    got = take(name, given)
    assert got.data_ptr() == given.data_ptr()
    assert torch.equal(take(name, given.numpy()), given)


@pytest.mark.parametrize(
    ("name", "came"),
    [
        ("seq_lens", np.int8),
        ("seq_lens", np.int64),
        ("seq_lens", np.uint16),
        ("seq_lens", np.uint32),
        ("seq_lens", np.longlong),
        ("req_pool_indices", np.int32),
        ("req_pool_indices", np.uint64),
        ("req_pool_indices", np.bool_),
        ("custom_mask", np.uint8),
        ("custom_mask", np.int64),
        ("input_embeds", np.float64),
        ("input_embeds", np.float16),
    ],
)
def test_casts_that_lose_nothing(take, verify_layouts, name, came):
    value = GOOD[name].numpy().astype(came)
    got = take(name, value)
    assert got.dtype is verify_layouts[name].dtype
    assert np.array_equal(got.numpy(), value)


@pytest.mark.parametrize(
    "came",
    [
        torch.arange(4, dtype=torch.int32)[::2],
        torch.arange(8, dtype=torch.int64).view(2, 4)[:, 1],
        np.arange(4, dtype=np.int32)[::-2],
        np.array([5, 6], dtype=np.dtype("i4").newbyteorder("S")),
        np.array([5, 6], dtype=np.dtype("i8").newbyteorder("S")),
        np.broadcast_to(np.int32(7), 2),
    ],
    ids=["strided", "column", "backwards", "swapped", "swapped wide", "broadcast"],
)
def test_any_memory_of_the_host_will_do(take, came):
    got = take("seq_lens", came)
    assert got.is_contiguous()
    assert not got.requires_grad
    expected = came.tolist() if isinstance(came, np.ndarray) else came.int().tolist()
    assert got.tolist() == expected


def test_read_only_memory_is_taken_without_a_warning(take):
    value = np.array([5, 6], dtype=np.int32)
    value.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert take("seq_lens", value).tolist() == [5, 6]


def test_nan_and_infinity_survive_a_cast(take):
    value = np.full((8, 8), np.nan)
    value[0] = np.inf
    got = take("input_embeds", value)
    assert got[0].isinf().all()
    assert got[1:].isnan().all()


@pytest.mark.parametrize(
    ("name", "value", "fact", "remedy"),
    [
        ("seq_lens", None, "is missing", r"Pass \(2,\) torch.int32"),
        ("seq_lens", np.ones(3, np.int32), r"has shape \(3,\)", r"needs \(2,\)"),
        ("seq_lens", np.ones((2, 1), np.int32), r"has shape \(2, 1\)", r"needs \(2,\)"),
        ("seq_lens", np.int32(7), r"has shape \(\)", r"needs \(2,\)"),
        ("mrope_positions", np.ones((8, 3), np.int64), r"shape \(8, 3\)", r"needs \(3, 8\)"),
        ("custom_mask", np.ones((2, 4, 3), bool), r"shape \(2, 4, 3\)", r"needs \(2, 4, 4\)"),
        ("seq_lens", np.array([1, 2**31]), "is torch.int64", "Pass torch.int32"),
        ("seq_lens", np.array([1.0, 2.0]), "is torch.float64", "Pass torch.int32"),
        ("seq_lens", np.array([1.0, 2.5]), "is torch.float64", "Pass torch.int32"),
        ("seq_lens", [1.0, 2.0], "is torch.float64", "Pass torch.int32"),
        ("seq_lens", torch.tensor([1.0, 2.0]), "is torch.float32", "Pass torch.int32"),
        ("custom_mask", np.full((2, 4, 4), 2), "is torch.int64", "Pass torch.bool"),
        ("input_embeds", np.full((8, 8), 1e300), "is torch.float64", "Pass torch.float32"),
        ("input_embeds", np.full((8, 8), 2), "is torch.int64", "Pass torch.float32"),
        ("input_embeds", np.ones((8, 8), bool), "is torch.bool", "Pass torch.float32"),
        ("seq_lens", "ab", "is a str", "Pass a tensor or a numpy array"),
        ("seq_lens", ["a", "b"], "is a list", "Pass a tensor or a numpy array"),
        ("seq_lens", {5: 6}, "is a dict", "Pass a tensor or a numpy array"),
        ("seq_lens", np.array([5, 6], object), "object", "Pass"),
        ("seq_lens", np.array(["5", "6"]), "<U1", "Pass"),
        ("seq_lens", [[1], [2, 3]], "is a list", "Pass a tensor or a numpy array"),
        ("seq_lens", np.array([5, 6], np.longdouble), "longdouble|float128", "Pass"),
        ("seq_lens", torch.ones(2, device="meta").int(), "is on meta", "Move it to cpu"),
        ("input_embeds", torch.ones(8, 8).to_sparse(), "sparse", "Pass"),
        ("input_embeds", torch.ones(8, 8, dtype=torch.complex64), "complex64", "Pass"),
        ("input_embeds", np.ones((8, 8), complex), "complex128", "Pass"),
        # Bits that mean something else in the field's dtype.
        ("seq_lens", np.array([5, 2**31 + 5], np.uint32), "is torch.uint32", "Pass torch.int32"),
        (
            "req_pool_indices",
            np.array([5, 2**63], np.uint64),
            "is torch.uint64",
            "Pass torch.int64",
        ),
        ("custom_mask", np.zeros((2, 4, 4)), "is torch.float64", "Pass torch.bool"),
    ],
)
def test_a_refusal_says_the_field_what_came_and_what_to_do(take, name, value, fact, remedy):
    with pytest.raises(InputError, match=rf"^field '{name}' .*({fact}).*({remedy})") as caught:
        take(name, value)
    assert caught.value.field == name
    assert str(caught.value).endswith(".")


def test_floats_are_rounded_to_the_width_of_the_field(take):
    value = np.full((8, 8), 0.1)
    assert take("input_embeds", torch.ones(8, 8).to(torch.float8_e4m3fn)).mean() == 1.0
    assert take("input_embeds", value).dtype is torch.float32
    assert np.array_equal(take("input_embeds", value).numpy(), value.astype(np.float32))
    parameter = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.float64))
    assert not take("input_embeds", parameter).requires_grad


@pytest.mark.parametrize("value", [[5, 6], (5, 6), [np.int64(5), 6], [True, False]], ids=str)
def test_python_numbers_are_taken(take, value):
    assert take("seq_lens", value).tolist() == [int(each) for each in value]
    rows = take("input_embeds", [[*value] * 4] * 8)
    assert rows.tolist() == [[float(each) for each in value] * 4] * 8


DTYPES = [np.int8, np.int64, np.uint32, np.uint64, np.float16, np.float32, np.float64, np.bool_]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 1), min_size=2, max_size=2))
def test_whether_a_dtype_is_taken_does_not_depend_on_values(take, dtype, values):
    is_int = np.dtype(dtype).kind in "biu"
    try:
        got = take("seq_lens", np.array(values, dtype))
    except InputError:
        assert not is_int
    else:
        assert is_int
        assert got.tolist() == values


numbers = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2).map(np.array),
    st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2).map(
        lambda v: np.array(v, np.uint32)
    ),
)


@given(numbers)
def test_an_int_is_taken_if_the_field_can_hold_it(take, value):
    fits = all(-(2**31) <= v < 2**31 for v in value.tolist())
    try:
        got = take("seq_lens", value)
    except InputError:
        assert not fits
    else:
        assert fits
        assert got.tolist() == value.tolist()
