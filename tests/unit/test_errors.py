"""The exceptions: hierarchy, builtin base classes, attributes, copies and messages."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit import errors
from graphkit.errors import (
    CaptureCause,
    CaptureError,
    ConfigError,
    DeviceError,
    GraphkitError,
    InputError,
    OutputError,
    ReplayError,
    SizeError,
    error_text,
    short_repr,
)

CLASSES = [
    thing
    for thing in vars(errors).values()
    if inspect.isclass(thing) and issubclass(thing, Exception)
]
EXAMPLES = [
    ConfigError("no", field="topk"),
    InputError("no", field="positions"),
    SizeError("no", batch_size=9, largest=8),
    CaptureError("DRAFT", 4, CaptureCause.UNSUPPORTED_OP, "aten::foo at model.py:3"),
    OutputError("no"),
    ReplayError("no"),
    DeviceError("no"),
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_exception_is_in_the_documented_hierarchy(cls):
    assert issubclass(cls, GraphkitError)
    assert cls.__name__ in errors.__doc__
    assert cls.__doc__


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (ConfigError, ValueError),
        (InputError, ValueError),
        (SizeError, ValueError),
        (OutputError, TypeError),
        (CaptureError, RuntimeError),
        (ReplayError, RuntimeError),
        (errors.AttentionError, ValueError),
        (errors.TargetError, ValueError),
        (errors.CheckpointError, ValueError),
        (errors.RecordError, ValueError),
        (DeviceError, RuntimeError),
    ],
)
def test_the_builtin_base_class_catches_it(cls, builtin):
    assert issubclass(cls, builtin)


def test_details_are_attributes():
    assert ConfigError("no", field="topk").field == "topk"
    assert ConfigError("no").field is None
    assert InputError("no", field="positions").field == "positions"
    size = SizeError("no", batch_size=9, largest=8)
    assert (size.batch_size, size.largest) == (9, 8)


@pytest.mark.parametrize("cause", list(CaptureCause))
def test_a_capture_error_names_mode_size_location_and_advice(cause):
    error = CaptureError("TARGET_VERIFY", 8, cause, "aten::foo at model.py:3")
    assert (error.mode, error.batch_size, error.cause, error.where) == (
        "TARGET_VERIFY", 8, cause, "aten::foo at model.py:3",
    )  # fmt: skip
    is_whole = cause.name in ("FORWARD_ERROR", "GRAPHKIT_ERROR", "MISSING_RANK")
    prefix = "" if is_whole else f"{cause.name.lower().replace('_', ' ')} in "
    assert str(error) == (
        f"cannot capture TARGET_VERIFY at batch size 8: {prefix}aten::foo at model.py:3. "
        f"{cause.value}"
    )
    others = [other.value for other in CaptureCause if other is not cause]
    assert not any(advice in str(error) for advice in others)


def test_the_advice_of_a_place_ends_the_message_in_the_place_of_that_of_the_cause():
    error = CaptureError("DECODE", 1, CaptureCause.UNSUPPORTED_OP, "here", advice="Do this.")
    assert str(error) == "cannot capture DECODE at batch size 1: unsupported op in here. Do this."


def test_each_cause_has_its_own_advice():
    advice = [cause.value for cause in CaptureCause]
    assert len(set(advice)) == len(list(CaptureCause.__members__))
    assert all(text.endswith(".") for text in advice)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("copied", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_keeps_type_message_and_attributes(error, copied):
    """A worker of a process pool pickles its exceptions."""
    copy_of_it = copied(error)
    assert type(copy_of_it) is type(error)
    assert str(copy_of_it) == str(error)
    assert vars(copy_of_it) == vars(error)


@dataclasses.dataclass
class Settings:
    """A setting with many numbers."""

    ids: tuple[int, ...] = ()
    scale: float = 1.0


class Unprintable:
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("a name", "'a name'"),
        (None, "None"),
        ([1, 2], "[1, 2]"),
        ((1,), "(1,)"),
        ((), "()"),
        ({"a": [1]}, "{'a': [1]}"),
        (set(), "set()"),
        (torch.float32, "torch.float32"),
        (torch.tensor(5), "tensor(5)"),
        (torch.zeros(3, 4), "Tensor of float32 [3, 4]"),
        (np.zeros(9, np.int64), "ndarray of int64 [9]"),
        ([torch.zeros(3, 4)] * 2, "[Tensor of float32 [3, 4], Tensor of float32 [3, 4]]"),
        (Settings((1, 2)), "Settings(ids=(1, 2), scale=1.0)"),
        (Unprintable(), "<Unprintable>"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_short_value_is_shown_as_it_is(value, text):
    assert short_repr(value) == text


LONG = {
    "text": "x" * 100_000,
    "numbers": list(range(100_000)),
    "tensors": [torch.zeros(64, 64)] * 1000,
    "table": {str(key): torch.zeros(8) for key in range(1000)},
    "settings": Settings(tuple(range(100_000))),
    "many": [Settings(tuple(range(100)))] * 100,
    "nested": [[[[[list(range(1000))] * 9] * 9] * 9] * 9],
    "array": np.zeros((1000, 1000)),
    "bytes": b"x" * 100_000,
    "module": torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(100))),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_value_is_cut(name):
    text = short_repr(LONG[name])
    assert 5 < len(text) < 260
    assert "\n" not in text


def test_a_list_that_contains_itself_has_an_end():
    items = [1]
    items.append(items)
    assert len(short_repr(items)) < 260


@pytest.mark.parametrize(
    "call",
    [
        lambda value: gk.SpecConfig(value, 3, 1, 4),
        lambda value: gk.SpecConfig("EAGLE", value, 1, 4),
        lambda value: gk.BufferSizes(value, 64, 8, 32, torch.float32),
        lambda value: gk.BufferSizes(4, 64, 8, 32, value),
        lambda value: gk.SamplingParams(temperature=value),
        lambda value: gk.SamplingParams(stop_token_ids=[value]),
        lambda value: gk.SamplingParams(seed=value),
        lambda value: gk.audit_target(value),
        lambda value: gk.audit_target(object(), only=value),
        lambda value: gk.inspect_graph(value),
        lambda value: gk.DecodeRunner(
            print, spec=value, sizes=gk.BufferSizes(4, 64, 8, 32, torch.float32)
        ),
        lambda value: gk.capture(value, torch.zeros(2, 2), batch_sizes=[2]),
        lambda value: gk.capture(print, value, batch_sizes=[2]),
        lambda value: gk.capture(print, torch.zeros(2, 2), batch_sizes=value),
    ],
)  # fmt: skip
def test_no_message_has_a_whole_long_value(call):
    for kind, value in LONG.items():
        with pytest.raises(gk.GraphkitError) as caught:
            call(value)
        assert len(str(caught.value)) < 1000, kind


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no rows.\nSee there."), "ValueError: no rows"), (KeyError(), "KeyError"),
        (SystemExit(5), "SystemExit: 5"),
    ],
)  # fmt: skip
def test_an_error_within_a_message_is_one_line_without_a_full_stop(error, text):
    assert error_text(error) == text
