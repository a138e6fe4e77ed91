"""The hooks call an observer at each step of a capture and leave graphs as they were."""

from __future__ import annotations

import pytest
import torch

from graphkit.audit.foreign import hooks
from graphkit.audit.foreign.following import hook_into
from graphkit.audit.foreign.hooks import observe_captures
from graphkit.audit.foreign.process_files import FOLDER_VARIABLE
from graphkit.errors import InspectError

CAPTURE_EVENTS = ["before_begin", "capture_begin", "after_begin", "before_end", "capture_end"]


class FakeObserver:
    """Appends its calls to ``events``; raises in those that ``fails`` names."""

    def __init__(self, events, fails=()):
        self.events, self.fails = events, fails

    def _append(self, event):
        self.events.append(event)
        if event in self.fails:
            raise OSError(f"no {event}")

    def before_begin(self):
        self._append("before_begin")

    def after_begin(self):
        self._append("after_begin")

    def before_end(self):
        self._append("before_end")

    def after_end(self, graph):
        assert graph.template == "kept"
        self._append("after_end")


@pytest.fixture
def events():
    """Calls of graphs and their observers, in order."""
    return []


@pytest.fixture
def graph_class(events):
    """A stand-in for ``torch.cuda.CUDAGraph`` whose methods append their names to ``events``."""

    class Graph:
        def __new__(cls, keep_graph=False):
            return super().__new__(cls)

        def __init__(self, keep_graph=False):
            self.keeps, self.template, self.executable = keep_graph, None, None

        def capture_begin(self, pool=None, capture_error_mode="global"):
            if pool == "bad":
                raise RuntimeError("no such pool")
            self.pool = pool
            events.append("capture_begin")

        def capture_end(self):
            if self.pool == "failing":
                raise RuntimeError("capture failed")
            events.append("capture_end")
            self.template = "kept"
            if not self.keeps:
                self.instantiate()
                self.template = None

        def instantiate(self):
            events.append("instantiate")
            self.executable = object()

        def raw_cuda_graph(self):
            return self.template

    return Graph


@pytest.fixture
def observed(graph_class, events, monkeypatch):
    """Return ``observed(*fails)``: the class, with observers that raise in those calls."""

    def make(*fails):
        monkeypatch.setattr(hooks, "_errors", [])
        observe_captures(graph_class, lambda: FakeObserver(events, fails))
        return graph_class

    return make


def capture(graph, pool=None):
    graph.capture_begin(pool=pool)
    graph.capture_end()


def test_an_observer_is_called_at_each_step(observed, events):
    graph = observed()()
    capture(graph)
    assert events == [*CAPTURE_EVENTS, "instantiate", "after_end"]
    assert graph.executable


@pytest.mark.parametrize("given", [((), {"keep_graph": True}), ((True,), {})])
def test_a_graph_that_is_kept_is_left_to_the_program_to_instantiate(observed, events, given):
    args, kwargs = given
    graph = observed()(*args, **kwargs)
    capture(graph)
    assert events == [*CAPTURE_EVENTS, "after_end"]
    assert graph.executable is None


@pytest.mark.parametrize("given", [((), {"keep_graph": False}), ((False,), {}), ((), {})])
def test_a_graph_that_is_not_kept_is_instantiated_once(observed, events, given):
    args, kwargs = given
    capture(observed()(*args, **kwargs))
    assert events.count("instantiate") == 1


def test_wrong_arguments_are_refused_as_before(observed):
    with pytest.raises(TypeError):
        observed()(1, 2)
    with pytest.raises(TypeError):
        observed()(keep=True)


def test_a_subclass_and_a_second_capture_are_observed_too(observed, events):
    class Named(observed()):
        def __new__(cls, name):
            return super().__new__(cls)

        def __init__(self, name):
            super().__init__()
            self.name = name

        def capture_begin(self, **options):
            super().capture_begin(**options)

    graph = Named("first")
    capture(graph)
    capture(graph)
    assert events == [*CAPTURE_EVENTS, "instantiate", "after_end"] * 2


def test_captures_that_overlap_are_kept_apart(observed, events):
    graph_class = observed()
    first, second = graph_class(), graph_class()
    first.capture_begin()
    second.capture_begin()
    first.capture_end()
    assert first.template
    assert not second.template
    second.capture_end()
    assert events.count("after_end") == 2


def test_a_capture_that_fails_to_begin_is_forgotten(observed, events):
    graph = observed()()
    with pytest.raises(RuntimeError, match="no such pool"):
        graph.capture_begin(pool="bad")
    assert events == ["before_begin"]
    capture(graph)
    assert events[1:] == [*CAPTURE_EVENTS, "instantiate", "after_end"]


def test_a_failed_capture_is_not_recorded_however_often_it_is_ended(observed, events):
    graph = observed()()
    with pytest.raises(RuntimeError, match="capture failed"):
        capture(graph, "failing")
    assert events[-1] == "before_end"
    graph.pool = None
    graph.capture_end()
    assert "after_end" not in events


@pytest.mark.parametrize("step", ["before_begin", "after_begin", "before_end", "after_end"])
def test_an_error_in_an_observer_is_printed_once_and_the_program_continues(
    observed, events, capsys, step
):
    graph_class = observed(step)
    graphs = [graph_class(), graph_class(), graph_class(keep_graph=True)]
    for graph in graphs:
        capture(graph)
    assert [graph.executable is None for graph in graphs] == [False, False, True]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("graphkit record: the recording of process ")
    assert lines[0].endswith(f" is incomplete: OSError: no {step}")
    assert events.count("after_end") == 3


def test_an_interruption_reaches_the_program(observed, monkeypatch):
    graph_class = observed()

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeObserver, "before_end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        capture(graph_class())


def test_a_closed_stderr_is_no_error(observed, monkeypatch):
    graph = observed("after_begin")()
    monkeypatch.setattr("sys.stderr", None)
    capture(graph)
    assert graph.executable


def test_methods_keep_their_names(observed, graph_class):
    names = graph_class.capture_end.__name__, graph_class.capture_end.__qualname__
    observed()
    assert (graph_class.capture_end.__name__, graph_class.capture_end.__qualname__) == names


def test_a_process_outside_a_recording_is_left_alone(graph_class, monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    before = dict(vars(graph_class))
    hook_into(graph_class)
    assert dict(vars(graph_class)) == before


def test_a_torch_that_cannot_keep_graphs_is_left_alone(graph_class, monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    del graph_class.raw_cuda_graph
    before = dict(vars(graph_class))
    with pytest.raises(InspectError, match=r"torch 2\.11 or newer"):
        hook_into(graph_class)
    assert dict(vars(graph_class)) == before


def test_the_class_of_torch_has_the_hooked_methods():
    assert {"capture_begin", "capture_end", "instantiate", "raw_cuda_graph"} <= set(
        vars(torch.cuda.CUDAGraph)
    )
