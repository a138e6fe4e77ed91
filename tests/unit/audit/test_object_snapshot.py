"""Tests of snapshots of the objects that a forward can reach."""

from __future__ import annotations

import random
from collections import deque
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest

from graphkit.audit.object_snapshot import ObjectSnapshot


class Phase(Enum):
    COLD = 1
    WARM = 2


def count(held):
    held.array += 1


def follow(held):
    held.number = held.number + 1


def note(held):
    held.log.append(1)


def draw(held):
    held.random.random()


def draw_in_numpy(held):
    held.generator.random()


def warm(held):
    held.phase = Phase.WARM


def settle(held):
    held.flag = True


@pytest.fixture
def held():
    return SimpleNamespace(
        array=np.zeros(3),
        number=np.int64(0),
        log=deque(),
        random=random.Random(0),
        generator=np.random.default_rng(0),
        phase=Phase.COLD,
        flag=1,
        unknown=float("nan"),
    )


@pytest.mark.parametrize(
    ("change", "name", "before", "after"),
    [
        (count, "array", "float64 [3]", "float64 [3]"),
        (follow, "number", "np.int64(0)", "np.int64(1)"),
        (note, "log", "0 items", "1 item"),
        (draw, "random", "random state", "random state"),
        (draw_in_numpy, "generator", "random state", "random state"),
        (warm, "phase", "<Phase.COLD: 1>", "<Phase.WARM: 2>"),
        (settle, "flag", "1", "True"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_change_is_reported_once_by_name(held, change, name, before, after):
    first = ObjectSnapshot({"forward": held}, {})
    change(held)
    (found,) = first.changes(ObjectSnapshot({"forward": held}, {}))
    assert (found.name, found.before.text, found.after.text) == (f"forward.{name}", before, after)


def test_equal_new_objects_are_no_change(held):
    first = ObjectSnapshot({"forward": held}, {})
    held.array, held.unknown = np.zeros(3), float("nan")
    assert not list(first.changes(ObjectSnapshot({"forward": held}, {})))


def test_globals_of_code_compiled_at_run_time_are_read():
    namespace = {"steps": 0}
    exec("def forward(): return steps", namespace)
    assert namespace["forward"].__module__ is None
    assert (
        ObjectSnapshot({"forward": namespace["forward"]}, {}).summaries["globals.steps"].text == "0"
    )
