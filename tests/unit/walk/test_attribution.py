"""Attribution records the module, line and scopes of every operation of a capture."""

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
    """Multiplies by its weight, then calls ``after``."""

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


def origins(function, where=None):
    """Origin of each operation, as (module, op without namespace, scope)."""
    where = Attribution() if where is None else where
    graph = RecorderBackend().capture(function, where)
    assert len(graph.origins) == len(graph.ops)
    return [(p.module, p.op.split("::")[1].split(".")[0], p.scope) for p in graph.origins]


def modules(function, where=None):
    return [module for module, _, _ in origins(function, where)]


def test_each_operation_belongs_to_the_innermost_module():
    model = Model()
    assert origins(lambda: model(X) - 1, Attribution(model)) == [
        ("first", "mul", ""), ("Model", "add", ""), ("blocks.0", "mul", ""),
        ("blocks.1", "mul", ""), ("Model", "neg", ""), ("", "sub", ""),
    ]  # fmt: skip


def test_an_operation_has_the_memory_of_its_arguments_and_results():
    graph = RecorderBackend().capture(lambda: torch.add(X, X[:1], alpha=2), Attribution())
    ((origin, result),) = zip(graph.origins, graph.ops[0].results, strict=True)
    assert list(origin.operands) == [
        (X.data_ptr(), 16), (X.data_ptr(), 4), (result.data_ptr(), 16),
    ]  # fmt: skip


def test_an_operation_names_its_line():
    model = Model()
    graph = RecorderBackend().capture(lambda: model(X), Attribution(model))
    sources = [origin.source for origin in graph.origins]
    assert all(source.startswith("walk/test_attribution.py:") for source in sources)
    assert [source.split(" in ")[1] for source in sources] == ["forward"] * 5
    assert sources[0] != sources[1] != sources[4]


def test_a_custom_operation_is_one_node():
    assert origins(lambda: twice_the_sine(X) + 1) == [("", "twice_the_sine", ""), ("", "add", "")]


def test_without_attribution_nodes_have_no_origin():
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

    assert [scope for _, _, scope in origins(step)] == ["outer", "outer/inner", "outer", ""]


def test_a_scope_ends_with_an_exception():
    def step():
        with suppress(ValueError), gk.scope("tried"):
            raise ValueError(X + 1)
        return X * 2

    assert [scope for _, _, scope in origins(step)] == ["tried", ""]


def test_a_node_of_no_operation_has_the_user_line():
    """Also if it is first counted when a scope ends, in code of contextlib."""
    launched, where = [], Attribution()
    with where.attributing(lambda: len(launched)):
        with gk.scope("sampler"):
            launched.append("a kernel")
        launched.append("a second kernel")
    sources = [origin.source.split(":")[0] for origin in where.origins]
    assert sources == ["walk/test_attribution.py"] * 2
    assert [origin.scope for origin in where.origins] == ["sampler", ""]


def test_a_scope_without_a_capture_does_nothing():
    with gk.scope("nothing"):
        assert torch.equal(X + 1, torch.full((4,), 2.0))
    assert origins(lambda: X + 1) == [("", "add", "")]


def test_a_stage_takes_the_place_of_a_module():
    model = Model()

    def step():
        with gk.scope("mine"), attribution.scope(Stage.STEP):
            y = X + 1
            with attribution.scope(Stage.FORWARD):
                return model.first(y) - 1

    graph = RecorderBackend().capture(step, Attribution(model))
    assert [origin.module for origin in graph.origins] == ["(step)", "first", "(forward)"]
    assert [origin.scope for origin in graph.origins] == ["mine"] * 3
    assert [bool(origin.source) for origin in graph.origins] == [False, True, True]


def fails(raised):
    def after(x):
        raise raised("in a module")

    return after


def assert_no_hooks_or_modes_remain():
    assert attribution._active == []
    assert [len(hooks) for hooks in HOOKS] == [0, 0]
    assert not is_in_torch_dispatch_mode(), "torch would run compiled functions eagerly"


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_a_failed_capture_leaves_no_hooks_or_modes(raised):
    broken, model = Model(fails(raised)), Model()
    where = Attribution(model)
    with pytest.raises(CaptureFailure if raised is ValueError else raised):
        RecorderBackend().capture(lambda: broken(X), where)
    assert_no_hooks_or_modes_remain()
    broken.late = Scaled()
    assert modules(lambda: model(broken.late(X)) - 1, where) == [
        "Scaled", "first", "Model", "blocks.0", "blocks.1", "Model", "",
    ]  # fmt: skip
    assert_no_hooks_or_modes_remain()


def test_a_caught_exception_ends_the_forward_of_its_module():
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


def test_attribution_holds_no_captured_tensor():
    where = Attribution()
    graph = RecorderBackend().capture(lambda: X + 1, where)
    made = weakref.ref(graph.ops[0].results[0])
    graph.close()
    del graph
    gc.collect()
    assert made() is None


def test_entering_without_a_capturing_stream_records_nothing():
    where = Attribution()
    with where:
        assert attribution._active == [where]
        torch.sin(X)
    assert where.origins == []
    assert_no_hooks_or_modes_remain()


def test_a_capture_may_begin_inside_of_a_forward():
    where = Attribution()

    class Begins(nn.Module):
        def forward(self, x):
            where.__enter__()
            return x

    begins, outer = Begins(), Scaled(lambda x: begins(x))
    for module in (begins, outer):  # makes torch look for hooks again after the forward
        module.register_forward_hook(lambda *_: None)
    assert torch.equal(outer(X), 2 * X)
    where.__exit__()
    assert_no_hooks_or_modes_remain()


def test_an_outer_attribution_continues_after_an_inner_one():
    model = Model()
    outer = Attribution(model)
    counted = []

    def inner():
        RecorderBackend().capture(lambda: model.first(X), Attribution(model))
        counted.append(model.first(X))
        return counted

    with outer.attributing(lambda: len(counted)):
        inner()
    assert [origin.module for origin in outer.origins] == [""]
    assert_no_hooks_or_modes_remain()


class Waits(nn.Module):
    """Runs in a scope of another thread until ``stop`` is set."""

    def __init__(self):
        super().__init__()
        self.runs, self.stop = threading.Event(), threading.Event()

    def forward(self, x):
        with gk.scope("elsewhere"):
            self.runs.set()
            assert self.stop.wait(10)
            return x + 1


def test_operations_of_another_thread_are_not_recorded():
    model, elsewhere = Model(), Waits()

    def step():
        thread = threading.Thread(target=elsewhere, args=[X])
        thread.start()
        assert elsewhere.runs.wait(10)
        y = X * 3
        elsewhere.stop.set()
        thread.join()
        return model.first(y) - 1

    assert origins(step, Attribution(model)) == [
        ("", "mul", ""),
        ("first", "mul", ""),
        ("", "sub", ""),
    ]
    assert_no_hooks_or_modes_remain()


def test_two_threads_record_their_captures_one_after_the_other():
    begun, found = threading.Barrier(2), {}

    def capture(number):
        def step():
            with gk.scope(f"scope {number}"):
                time.sleep(0.02)
                return Scaled()(X)

        begun.wait(10)
        found[number] = origins(step)

    threads = [threading.Thread(target=capture, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = {n: {(m, scope) for m, op, scope in each if op == "mul"} for n, each in found.items()}
    assert kinds == {n: {("Scaled", f"scope {n}")} for n in range(2)}
    assert_no_hooks_or_modes_remain()


def test_of_two_simultaneous_captures_one_is_attributed():
    """Overlapping modes of two threads would leave one active. Waiting could deadlock, because the
    captures of two ranks may wait for each other."""
    both, ended, found = threading.Barrier(2), threading.Event(), {}

    def attribute(name, is_second):
        where, count = Attribution(), iter(range(100))
        with where.attributing(lambda: next(count)):
            both.wait(10)
            X + 1
            if is_second:
                assert ended.wait(10)
        ended.set()
        found[name] = {origin.op for origin in where.origins}

    threads = [threading.Thread(target=attribute, args=[n, n]) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, found.values()))[0] == 0
    assert any("aten::add.Tensor" in ops for ops in found.values())
    assert_no_hooks_or_modes_remain()


@pytest.fixture
def compiled():
    """A model, its compiled function, and the operations of each compiled graph."""
    torch._dynamo.reset()
    pieces = []

    def backend(graph, _inputs):
        pieces.append([node.target for node in graph.graph.nodes if node.op.startswith("call_")])
        return graph.forward

    model = Model()
    yield model, torch.compile(model, backend=backend), pieces
    torch._dynamo.reset()


def attributed_modules(function, modules):
    """Run a function with attribution; return the modules of its operations."""
    where = Attribution(modules)
    count = iter(range(10_000))
    with where.attributing(lambda: next(count)):
        function()
    return {origin.module for origin in where.origins if origin.op}


def test_compilation_during_a_capture_is_unchanged(compiled):
    model, function, pieces = compiled
    with warnings.catch_warnings(action="error"):
        assert attributed_modules(lambda: function(X), model) == {"Model"}
    assert [len(piece) for piece in pieces] == [5], "one graph"
    function(X)
    assert attributed_modules(lambda: function(X), model) == {"Model"}
    assert len(pieces) <= 2, "torch may recompile once without the hooks"
    assert {len(piece) for piece in pieces} == {5}


def test_attribution_does_not_recompile(compiled):
    model, function, pieces = compiled
    function(X)
    with warnings.catch_warnings(action="error"):
        assert attributed_modules(lambda: function(X), model) == {"Model"}
    function(X)
    assert [len(piece) for piece in pieces] == [5]


def test_a_scope_in_a_compiled_function_has_no_effect(compiled):
    model = compiled[0]

    def forward(x):
        with gk.scope("inside"):
            return model(x)

    function = torch.compile(forward, backend="eager", fullgraph=True)
    assert torch.equal(function(X), model(X))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert attributed_modules(lambda: function(X), model) == {""}
