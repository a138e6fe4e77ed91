"""Every operation of a capture knows its module, its line and the scopes around it."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import graphkit as gk
from graphkit.graphs import Attribution, CaptureFailure, RecorderBackend, Stage, attribution

X = torch.ones(4)
HOOKS = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)


class Scaled(nn.Module):
    """Multiplies; ``after`` runs in its forward, behind that."""

    def __init__(self, after=lambda x: x):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.after = after

    def forward(self, x):
        return self.after(x * self.weight)


class Model(nn.Module):
    def __init__(self, after=lambda x: x):
        super().__init__()
        self.first = Scaled()
        self.blocks = nn.ModuleList([Scaled(after), Scaled()])

    def forward(self, x):
        y = self.first(x) + 1
        for block in self.blocks:
            y = block(y)
        return y.neg()


@torch.library.custom_op("graphkit_tests::twice_the_sine", mutates_args=())
def twice_the_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


def told(function, where=None):
    """What is noted of each operation, as (module, op without namespace, scope)."""
    where = Attribution() if where is None else where
    graph = RecorderBackend().capture(function, where)
    assert len(graph.origins) == len(graph.ops)
    return [(p.module, p.op.split("::")[1].split(".")[0], p.scope) for p in graph.origins]


def modules(function, where=None):
    return [module for module, _, _ in told(function, where)]


def test_each_operation_belongs_to_the_innermost_module():
    model = Model()
    assert told(lambda: model(X) - 1, Attribution(model)) == [
        ("first", "mul", ""), ("Model", "add", ""), ("blocks.0", "mul", ""),
        ("blocks.1", "mul", ""), ("Model", "neg", ""), ("", "sub", ""),
    ]  # fmt: skip


def test_an_operation_names_its_line():
    model = Model()
    graph = RecorderBackend().capture(lambda: model(X), Attribution(model))
    sources = [place.source for place in graph.origins]
    assert all(source.startswith("walk/test_attribution.py:") for source in sources)
    assert [source.split(" in ")[1] for source in sources] == ["forward"] * 5
    assert sources[0] != sources[1] != sources[4]


def test_a_custom_operation_is_one_node():
    assert told(lambda: twice_the_sine(X) + 1) == [("", "twice_the_sine", ""), ("", "add", "")]


def test_without_attribution_nothing_is_noted():
    model = Model()
    graph = RecorderBackend().capture(lambda: model(X))
    assert graph.origins == ()
    assert {(n.module, n.source, n.scope) for n in gk.inspect_graph(graph).nodes} == {("", "", "")}


def test_scopes_nest_and_end():
    def step():
        with gk.scope("outer"):
            y = X + 1
            with gk.scope("inner"):
                y = y * 2
            y = y - 1
        return y.neg()

    assert [scope for _, _, scope in told(step)] == ["outer", "outer/inner", "outer", ""]


def test_a_scope_ends_with_an_exception():
    def step():
        with suppress(ValueError), gk.scope("tried"):
            raise ValueError(X + 1)
        return X * 2

    assert [scope for _, _, scope in told(step)] == ["tried", ""]


def test_a_launch_that_is_no_operation_belongs_to_the_users_line():
    """Also where it is noticed only when a block around it ends, by the library's own hands."""
    launched, where = [], Attribution()
    with where.attributing(lambda: len(launched)):
        with gk.scope("sampler"):
            launched.append("a kernel")
        launched.append("another")
    sources = [place.source.split(":")[0] for place in where.origins]
    assert sources == ["walk/test_attribution.py"] * 2
    assert [place.scope for place in where.origins] == ["sampler", ""]


def test_a_scope_does_nothing_where_nothing_is_captured():
    with gk.scope("nothing"):
        assert torch.equal(X + 1, torch.full((4,), 2.0))
    assert told(lambda: X + 1) == [("", "add", "")]


def test_stages_stand_where_a_module_would():
    model = Model()

    def step():
        with gk.scope("mine"), attribution.scope(Stage.STEP):
            y = X + 1
            with attribution.scope(Stage.FORWARD):
                return model.first(y) - 1

    graph = RecorderBackend().capture(step, Attribution(model))
    assert [place.module for place in graph.origins] == ["(step)", "first", "(forward)"]
    assert [place.scope for place in graph.origins] == ["mine"] * 3
    assert [bool(place.source) for place in graph.origins] == [False, True, True]


def fails(raised):
    def after(x):
        raise raised("in a module")

    return after


def assert_nothing_is_left():
    assert attribution._active == []
    assert [len(hooks) for hooks in HOOKS] == [0, 0]
    assert not is_in_torch_dispatch_mode(), "torch would never compile again"


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_a_failed_capture_leaves_nothing_behind(raised):
    broken, model = Model(fails(raised)), Model()
    where = Attribution(model)
    with pytest.raises(CaptureFailure if raised is ValueError else raised):
        RecorderBackend().capture(lambda: broken(X), where)
    assert_nothing_is_left()
    broken.late = Scaled()
    assert modules(lambda: model(broken.late(X)) - 1, where) == [
        "Scaled", "first", "Model", "blocks.0", "blocks.1", "Model", "",
    ]  # fmt: skip
    assert_nothing_is_left()


def test_an_exception_that_the_forward_catches_ends_the_module():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.broken, self.spare = Scaled(fails(ValueError)), Scaled()

        def forward(self, x):
            try:
                return self.broken(x)
            except ValueError:
                return self.spare(x) + 1

    model = Tries()
    assert modules(lambda: model(X), Attribution(model)) == ["broken", "spare", "Tries"]


def test_one_attribution_serves_many_captures():
    model = Model()
    where = Attribution(model)
    first = RecorderBackend().capture(lambda: model(X), where)
    second = RecorderBackend().capture(lambda: model.first(X), where)
    assert [len(first.origins), len(second.origins)] == [5, 1]
    assert second.origins[0].module == "first"


def test_an_attribution_does_not_keep_what_was_captured():
    where = Attribution()
    graph = RecorderBackend().capture(lambda: X + 1, where)
    made = weakref.ref(graph.ops[0].results[0])
    graph.close()
    del graph
    gc.collect()
    assert made() is None


def test_by_hand_nothing_is_noted_where_no_stream_captures():
    where = Attribution()
    with where:
        assert attribution._active == [where]
        torch.sin(X)
    assert where.origins == []
    assert_nothing_is_left()


def test_a_capture_may_begin_within_a_modules_forward():
    where = Attribution()

    class Begins(nn.Module):
        def forward(self, x):
            where.__enter__()
            return x

    begins, outer = Begins(), Scaled(lambda x: begins(x))
    for module in (begins, outer):  # then torch looks for hooks again after the forward
        module.register_forward_hook(lambda *_: None)
    assert torch.equal(outer(X), 2 * X)
    where.__exit__()
    assert_nothing_is_left()


def test_the_outer_of_two_attributions_goes_on():
    model = Model()
    outer = Attribution(model)
    counted = []

    def inner():
        RecorderBackend().capture(lambda: model.first(X), Attribution(model))
        counted.append(model.first(X))
        return counted

    with outer.attributing(lambda: len(counted)):
        inner()
    assert [place.module for place in outer.origins] == [""]
    assert_nothing_is_left()


class Waits(nn.Module):
    """Runs in a thread of its own, in a scope, until told to stop."""

    def __init__(self):
        super().__init__()
        self.runs, self.stop = threading.Event(), threading.Event()

    def forward(self, x):
        with gk.scope("elsewhere"):
            self.runs.set()
            assert self.stop.wait(10)
            return x + 1


def test_what_another_thread_runs_meanwhile_is_not_in_the_capture():
    model, elsewhere = Model(), Waits()

    def step():
        thread = threading.Thread(target=elsewhere, args=[X])
        thread.start()
        assert elsewhere.runs.wait(10)
        y = X * 3
        elsewhere.stop.set()
        thread.join()
        return model.first(y) - 1

    assert told(step, Attribution(model)) == [
        ("", "mul", ""),
        ("first", "mul", ""),
        ("", "sub", ""),
    ]
    assert_nothing_is_left()


def test_two_threads_attribute_their_own_captures_one_after_the_other():
    begun, found = threading.Barrier(2), {}

    def capture(number):
        def step():
            with gk.scope(f"scope {number}"):
                time.sleep(0.02)
                return Scaled()(X)

        begun.wait(10)
        found[number] = told(step)

    threads = [threading.Thread(target=capture, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = {n: {(m, scope) for m, op, scope in noted if op == "mul"} for n, noted in found.items()}
    assert kinds == {n: {("Scaled", f"scope {n}")} for n in range(2)}
    assert_nothing_is_left()


def test_of_two_threads_that_capture_at_once_one_attributes():
    """torch's modes may not overlap: the first one's end and then the second one's leave one on.
    Nor may one wait, since captures of two ranks may wait for one another."""
    both, ended, found = threading.Barrier(2), threading.Event(), {}

    def attribute(name, is_second):
        where, count = Attribution(), iter(range(100))
        with where.attributing(lambda: next(count)):
            both.wait(10)
            X + 1
            if is_second:
                assert ended.wait(10)
        ended.set()
        found[name] = {place.op for place in where.origins}

    threads = [threading.Thread(target=attribute, args=[n, n]) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, found.values()))[0] == 0
    assert any("aten::add.Tensor" in ops for ops in found.values())
    assert_nothing_is_left()


@pytest.fixture
def compiled():
    """A model under torch.compile that runs as one piece, and the operations of a run."""
    torch._dynamo.reset()
    pieces = []

    def backend(graph, _inputs):
        pieces.append([node.target for node in graph.graph.nodes if node.op.startswith("call_")])
        return graph.forward

    model = Model()
    yield model, torch.compile(model, backend=backend), pieces
    torch._dynamo.reset()


def noted(function, modules):
    """Runs a function with attribution; the modules that it notes."""
    where = Attribution(modules)
    count = iter(range(10_000))
    with where.attributing(lambda: next(count)):
        function()
    return {place.module for place in where.origins if place.op}


def test_what_compiles_during_a_capture_compiles_as_without(compiled):
    model, function, pieces = compiled
    with warnings.catch_warnings(action="error"):
        assert noted(lambda: function(X), model) == {"Model"}
    assert [len(piece) for piece in pieces] == [5], "in one piece"
    function(X)
    assert noted(lambda: function(X), model) == {"Model"}
    assert len(pieces) <= 2, "torch may look once more when the hooks are gone"
    assert {len(piece) for piece in pieces} == {5}


def test_what_was_compiled_before_stays_as_it_is(compiled):
    model, function, pieces = compiled
    function(X)
    with warnings.catch_warnings(action="error"):
        assert noted(lambda: function(X), model) == {"Model"}
    function(X)
    assert [len(piece) for piece in pieces] == [5]


def test_a_scope_in_a_compiled_function_changes_nothing_there(compiled):
    model = compiled[0]

    def forward(x):
        with gk.scope("inside"):
            return model(x)

    function = torch.compile(forward, backend="eager", fullgraph=True)
    assert torch.equal(function(X), model(X))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert noted(lambda: function(X), model) == {""}
