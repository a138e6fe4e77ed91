"""``graphkit inspect`` in a pipe: a record or a target, as text or as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

from graphkit.records import (
    CaptureRecord,
    Environment,
    ForeignRecord,
    GraphRecord,
    Process,
    load_record,
)

ENVIRONMENT = Environment(device="cpu", torch="2", triton="", cuda="", driver="", graphkit="0")


def test_a_record_is_shown_as_text(run, saved):
    ended = run("inspect", saved)
    assert (ended.code, ended.err) == (0, "")
    assert "mode and size" in ended.out
    assert "\nDECODE 2\n" in ended.out
    assert "\x1b" not in ended.out
    plain = run("inspect", saved, "--plain")
    assert (plain.code, plain.err, plain.out.isascii()) == (0, "", True)
    assert plain.out.splitlines()[0] == ended.out.splitlines()[0]


def test_a_target_is_captured_and_inspected(run, tiny, here):
    ended = run("inspect", f"{tiny}:right", "--mode", "decode", "--batch-sizes", "1,2")
    assert ended.code == 0
    assert "\nDECODE 1\n" in ended.out
    assert "TARGET_VERIFY" not in ended.out
    assert list(here.iterdir()) == []


def test_json_is_the_record(run, saved, tiny, here):
    assert run("inspect", saved, "--json").out == saved.read_text()
    selected = run("inspect", saved, "--json", "--mode", "decode", "--batch-size", "2").out
    assert [graph["name"] for graph in json.loads(selected)["graphs"]] == ["DECODE 2"]
    assert run("inspect", saved, "--json", "--mode", "none").code == 2
    ended = run("inspect", f"{tiny}:right", "--mode", "decode", "--json")
    (here / "printed").write_text(ended.out)
    record = CaptureRecord.load("printed")
    assert [graph.name for graph in record.graphs] == ["DECODE 1", "DECODE 2"]
    assert all(graph.nodes for graph in record.graphs)


def test_a_file_needs_no_suffix(run, saved, here):
    saved.rename(here / "kept")
    assert run("inspect", "kept").code == 0


def test_a_mode_and_a_size_are_selected(run, saved):
    ended = run("inspect", saved, "--mode", "Decode", "--batch-size", "2")
    assert "\nDECODE 2\n" in ended.out
    assert "\nDECODE 1\n" not in ended.out
    assert "TARGET_VERIFY 2" not in ended.out


def test_several_modes_of_a_target_are_all_shown(run, tiny, here):
    ended = run("inspect", f"{tiny}:right", "--mode", "decode", "--mode", "target_verify")
    assert ended.code == 0
    assert "\nDECODE 2\n" in ended.out
    assert "\nTARGET_VERIFY 2\n" in ended.out


def test_single_graphs_and_recordings_are_records_too(run, saved, here):
    graph = CaptureRecord.load(saved).graphs[0]
    (here / "graph.json").write_text(graph.to_json())
    recording = ForeignRecord(
        command=("serve.py",),
        exit_code=0,
        environment=ENVIRONMENT,
        processes=(Process(pid=1, command=()),),
        graphs=(graph,),
    )
    (here / "recording.json").write_text(recording.to_json())
    for name in ("graph.json", "recording.json"):
        ended = run("inspect", name)
        assert (ended.code, ended.err) == (0, "")
        assert graph.name in ended.out
        assert run("inspect", name, "--json").out == (here / name).read_text()
    assert isinstance(load_record(here / "graph.json"), GraphRecord)


def test_wrong_replays_of_a_target_are_a_failure(run, tiny, here):
    ended = run("inspect", f"{tiny}:leaks", "--mode", "decode")
    assert ended.code == 1
    assert "DECODE 2" in ended.out
    (message,) = ended.messages
    assert message.startswith("replays differ from the step without a graph in 1 row. Run graphkit")


def test_text_of_a_record_needs_neither_torch_nor_textual(saved):
    code = (
        "import sys; from graphkit.cli import main; code = main(['inspect', sys.argv[1]])\n"
        "print('LOADED', code, *{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, saved], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.rpartition("LOADED")[2].split()
    assert loaded[0] == "0"
    assert not {"torch", "textual"} & set(loaded)


def test_the_screen_opens_only_on_a_terminal(run, saved, monkeypatch):
    """Check its arguments; its content is tested with the screen."""
    opened = []

    class Screen:
        return_code = None

        def __init__(self, record, **selection):
            opened.append((record.target, selection))

        def run(self):
            pass

        def exit(self):
            pass

    monkeypatch.setattr("graphkit.views.tui.InspectApp", Screen)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    run("inspect", saved)
    monkeypatch.setattr("graphkit.cli.inspect._has_screen", lambda: True)
    assert run("inspect", saved, "--mode", "decode", "--batch-size", "2").out == ""
    facts = {"mode": "decode", "batch_size": 2, "by": "module"}
    assert opened == [("tiny", facts)]
    assert json.loads(run("inspect", saved, "--json").out)["target"] == "tiny"
    assert len(opened) == 1
    monkeypatch.setattr(Screen, "return_code", 1)
    assert run("inspect", saved).code == 1
