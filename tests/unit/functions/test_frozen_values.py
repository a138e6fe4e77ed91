"""Host numbers that a captured function keeps are found wherever the function reads them."""

from __future__ import annotations

from functools import partial, wraps
from types import SimpleNamespace

import pytest
import torch

import graphkit as gk
from function_models import rows

FACTORS = {"all": 2.0, "nested": {"list": [2.0]}}


class Scaled:
    """Reads numbers of an object."""

    def __init__(self):
        self.factor, self.options = 2.0, {"factors": [2.0]}

    def __call__(self, x):
        return x * self.factor

    def run(self, x):
        return x * self.options["factors"][0]


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 2.0

    def forward(self, x):
        return x * self.factor


def closure():
    factor, inner = 2.0, [2.0]

    def helper(x):
        return x * inner[0]

    def fn(x):
        return helper(x) * factor

    def change():
        nonlocal factor
        factor = 3.0

    return fn, change, partial(inner.__setitem__, 0, 3.0)


def decorated():
    state = SimpleNamespace(factor=2.0)

    def decorate(fn):
        @wraps(fn)
        def wrapper(x):
            return fn(x) * state.factor

        return wrapper

    return decorate(lambda x: x + 1), partial(setattr, state, "factor", 3.0)


def defaults():
    def fn(x, factor=2.0, *, named=2.0):
        return x * factor * named

    return (
        fn,
        partial(setattr, fn, "__defaults__", (3.0,)),
        partial(fn.__kwdefaults__.__setitem__, "named", 3.0),
    )


def cases():
    fn, *changes = closure()
    yield "closure", fn, changes[0]
    yield "helper", fn, changes[1]
    yield ("decorator", *decorated())
    fn, *changes = defaults()
    yield "default", fn, changes[0]
    yield "keyword default", fn, changes[1]
    scaled = Scaled()
    yield "object", scaled, partial(setattr, scaled, "factor", 3.0)
    yield "method", scaled.run, partial(scaled.options["factors"].__setitem__, 0, 3.0)
    other = Scaled()
    yield "unbound", partial(Scaled.__call__, other), partial(setattr, other, "factor", 3.0)
    layer = Layer().eval()
    yield "module", layer, partial(setattr, layer, "factor", 3.0)
    bound = partial(lambda x, factor: x * factor, factor=2.0)
    yield "partial", bound, partial(bound.keywords.__setitem__, "factor", 3.0)
    yield "global", lambda x: x * FACTORS["all"], partial(FACTORS.__setitem__, "all", 3.0)
    items = FACTORS["nested"]["list"]
    yield "nested", lambda x: x * FACTORS["nested"]["list"][0], partial(items.__setitem__, 0, 3.0)


CASES = {name: (fn, change) for name, fn, change in cases()}


@pytest.mark.parametrize("case", CASES)
def test_the_checking_mode_refuses_a_changed_number(case, capture, monkeypatch):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    fn, change = CASES[case]
    x, _ = rows()
    captured = capture(fn, x, batch_sizes=[4])
    captured(x)
    change()
    with pytest.raises(gk.ReplayError, match=r"has changed since capture \(2.0, then 3.0\)"):
        captured(x)


def test_the_audit_finds_it(capture):
    fn, _, _ = closure()
    captured = capture(fn, rows()[0], batch_sizes=[4])
    found = gk.audit_target(
        captured.target, batch_sizes=[4], device="cpu", only=["frozen"]
    ).findings
    assert any("factor" in finding.text for finding in found), found
