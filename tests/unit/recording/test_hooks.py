"""What graphs tell of their capture, and that they are the same graphs to the program."""

from __future__ import annotations

import pytest
import torch

from graphkit.errors import InspectError
from graphkit.recording import hooks
from graphkit.recording.hooks import follow_captures, hook_into
from graphkit.recording.parts import FOLDER

LIFE = ["beginning", "capture_begin", "begun", "ending", "capture_end"]


class Follower:
    """Writes down when it was told what; fails where it is asked to."""

    def __init__(self, told, fails=()):
        self.told, self.fails = told, fails

    def _say(self, what):
        self.told.append(what)
        if what in self.fails:
            raise OSError(f"no {what}")

    def beginning(self):
        self._say("beginning")

    def begun(self):
        self._say("begun")

    def ending(self):
        self._say("ending")

    def ended(self, graph):
        assert graph.template == "kept"
        self._say("ended")


@pytest.fixture
def told():
    """What happened to graphs and their followers, in order."""
    return []


@pytest.fixture
def graph_class(told):
    """The Python side of ``torch.cuda.CUDAGraph``, whose C++ side is told the same way."""

    class Graph:
        def __new__(cls, keep_graph=False):
            return super().__new__(cls)

        def __init__(self, keep_graph=False):
            self.keeps, self.template, self.executable = keep_graph, None, None

        def capture_begin(self, pool=None, capture_error_mode="global"):
            if pool == "bad":
                raise RuntimeError("no such pool")
            self.pool = pool
            told.append("capture_begin")

        def capture_end(self):
            if self.pool == "failing":
                raise RuntimeError("capture failed")
            told.append("capture_end")
            self.template = "kept"
            if not self.keeps:
                self.instantiate()
                self.template = None

        def instantiate(self):
            told.append("instantiate")
            self.executable = object()

        def raw_cuda_graph(self):
            return self.template

    return Graph


@pytest.fixture
def followed(graph_class, told, monkeypatch):
    """``followed(*fails)``: the class with followers that fail there."""

    def make(*fails):
        monkeypatch.setattr(hooks, "_failed", [])
        follow_captures(graph_class, lambda: Follower(told, fails))
        return graph_class

    return make


def capture(graph, pool=None):
    graph.capture_begin(pool=pool)
    graph.capture_end()


def test_a_follower_hears_of_each_step(followed, told):
    graph = followed()()
    capture(graph)
    assert told == [*LIFE, "instantiate", "ended"]
    assert graph.executable


@pytest.mark.parametrize("given", [((), {"keep_graph": True}), ((True,), {})])
def test_who_keeps_the_graph_instantiates_it(followed, told, given):
    words, named = given
    graph = followed()(*words, **named)
    capture(graph)
    assert told == [*LIFE, "ended"]
    assert graph.executable is None


@pytest.mark.parametrize("given", [((), {"keep_graph": False}), ((False,), {}), ((), {})])
def test_who_does_not_has_it_instantiated_once(followed, told, given):
    words, named = given
    capture(followed()(*words, **named))
    assert told.count("instantiate") == 1


def test_wrong_words_are_refused_as_before(followed):
    with pytest.raises(TypeError):
        followed()(1, 2)
    with pytest.raises(TypeError):
        followed()(keep=True)


def test_a_subclass_and_a_second_capture_are_followed_too(followed, told):
    class Named(followed()):
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
    assert told == [*LIFE, "instantiate", "ended"] * 2


def test_captures_that_overlap_are_kept_apart(followed, told):
    graph_class = followed()
    one, other = graph_class(), graph_class()
    one.capture_begin()
    other.capture_begin()
    one.capture_end()
    assert one.template
    assert not other.template
    other.capture_end()
    assert told.count("ended") == 2


def test_a_capture_that_does_not_begin_is_forgotten(followed, told):
    graph = followed()()
    with pytest.raises(RuntimeError, match="no such pool"):
        graph.capture_begin(pool="bad")
    assert told == ["beginning"]
    capture(graph)
    assert told[1:] == [*LIFE, "instantiate", "ended"]


def test_a_capture_that_fails_is_not_recorded_however_often_it_is_ended(followed, told):
    graph = followed()()
    with pytest.raises(RuntimeError, match="capture failed"):
        capture(graph, "failing")
    assert told[-1] == "ending"
    graph.pool = None
    graph.capture_end()
    assert "ended" not in told


@pytest.mark.parametrize("step", ["beginning", "begun", "ending", "ended"])
def test_an_error_of_ours_is_said_once_and_the_program_goes_on(followed, told, capsys, step):
    graph_class = followed(step)
    graphs = [graph_class(), graph_class(), graph_class(keep_graph=True)]
    for graph in graphs:
        capture(graph)
    assert [graph.executable is None for graph in graphs] == [False, False, True]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("graphkit record: process ")
    assert said[0].endswith(f"OSError: no {step}")
    assert told.count("ended") == 3


def test_an_interruption_is_the_programs(followed, monkeypatch):
    graph_class = followed()

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "ending", interrupted)
    with pytest.raises(KeyboardInterrupt):
        capture(graph_class())


def test_a_closed_stderr_is_no_error(followed, monkeypatch):
    graph = followed("begun")()
    monkeypatch.setattr("sys.stderr", None)
    capture(graph)
    assert graph.executable


def test_methods_look_as_before(followed, graph_class):
    names = graph_class.capture_end.__name__, graph_class.capture_end.__qualname__
    followed()
    assert (graph_class.capture_end.__name__, graph_class.capture_end.__qualname__) == names


def test_a_process_of_no_recording_is_left_alone(graph_class, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    before = dict(vars(graph_class))
    hook_into(graph_class)
    assert dict(vars(graph_class)) == before


def test_a_torch_that_cannot_keep_graphs_is_left_alone(graph_class, monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    del graph_class.raw_cuda_graph
    before = dict(vars(graph_class))
    with pytest.raises(InspectError, match=r"torch 2\.11 or newer"):
        hook_into(graph_class)
    assert dict(vars(graph_class)) == before


def test_the_class_of_torch_has_what_is_needed():
    assert {"capture_begin", "capture_end", "instantiate", "raw_cuda_graph"} <= set(
        vars(torch.cuda.CUDAGraph)
    )
