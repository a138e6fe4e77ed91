"""The exceptions: hierarchy, builtin base classes, attributes, copies and messages."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

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
