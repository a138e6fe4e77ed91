"""``graphkit inspect`` in a pipe: a record or a target, as text or as the record itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from graphkit.records import (
    BenchReport,
    CaptureRecord,
    Environment,
    GraphRecord,
    RecordingRecord,
    load_record,
)

NOWHERE = Environment(device="cpu", torch="2", triton="", cuda="", driver="", graphkit="0")


def test_a_record_is_shown_as_text(run, saved):
    ended = run("inspect", saved)
    assert (ended.code, ended.err) == (0, "")
    assert "mode and size" in ended.out
    assert "\nDECODE 2\n" in ended.out
    assert "\x1b" not in ended.out
    assert run("inspect", saved, "--plain") == ended


def test_a_target_is_captured_and_looked_into(run, tiny, here):
    ended = run("inspect", f"{tiny}:right", "--mode", "decode", "--batch-sizes", "1,2")
    assert ended.code == 0
    assert "\nDECODE 1\n" in ended.out
    assert "TARGET_VERIFY" not in ended.out
    assert list(here.iterdir()) == []


def test_json_is_the_record(run, saved, tiny, here):
    assert run("inspect", saved, "--json").out == saved.read_text()
    ended = run("inspect", f"{tiny}:right", "--mode", "decode", "--json")
    (here / "made").write_text(ended.out)
    record = CaptureRecord.load("made")
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
    recording = RecordingRecord(
        command=("serve.py",), exit_code=0, environment=NOWHERE, processes=(), graphs=(graph,)
    )
    (here / "recording.json").write_text(recording.to_json())
    for name in ("graph.json", "recording.json"):
        ended = run("inspect", name)
        assert (ended.code, ended.err) == (0, "")
        assert graph.name in ended.out
        assert run("inspect", name, "--json").out == (here / name).read_text()
    assert isinstance(load_record(here / "graph.json"), GraphRecord)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read record"),
        (b"", "not a whole record"),
        (b'{"kind": "capture", "schema": 1, "tar', "not a whole record"),
        (b'{"kind": "capture", "schema": 1}', "not a whole record"),
        (b'{"kind": "capture", "schema": 99}', "Upgrade graphkit"),
        (b'{"kind": "photograph", "schema": 1}', "no record of graphkit"),
        (b"[1, 2]", "not a record of graphkit"),
        (b"\xff\x00", "cannot read record"),
    ],
)
@pytest.mark.parametrize("word", ["--plain", "--json"])
def test_what_is_no_record_is_refused_on_one_line(run, here, content, said, word):
    if content is not None:
        (here / "in.json").write_bytes(content)
    ended = run("inspect", "in.json", word)
    assert (ended.code, ended.out) == (1, "")
    assert said in ended.error


def test_half_a_record_is_refused_on_one_line(run, saved):
    text = saved.read_text()
    saved.write_text(text[: len(text) // 2])
    ended = run("inspect", saved)
    assert (ended.code, ended.out) == (1, "")
    assert "not a whole record" in ended.error


def test_a_record_that_holds_no_graphs_is_refused_on_one_line(run, here):
    report = BenchReport(name="refresh", environment=NOWHERE, settings={}, measures=())
    (here / "bench.json").write_text(report.to_json())
    ended = run("inspect", "bench.json")
    assert (ended.code, ended.out) == (1, "")
    assert "'bench'" in ended.error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batch-sizes", "1,2"), "--batch-sizes is for a TARGET"),
        (("--mode", "decode", "--mode", "draft"), "--mode came more than once"),
        (("--mode", "nonsense"), "no mode 'nonsense'"),
        (("--batch-size", "3"), "no batch size 3"),
    ],
)
def test_words_that_do_not_suit_the_record_are_wrong_usage(run, saved, words, said):
    ended = run("inspect", saved, *words)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.error


@pytest.mark.parametrize(
    ("words", "said"),
    [(("nonsense",), "TARGET 'nonsense'"), (("{}:right", "--mode", "no"), "unknown mode 'no'")],
)
def test_what_is_neither_a_record_nor_a_target_is_wrong_usage(run, tiny, words, said):
    ended = run("inspect", *(word.format(tiny) for word in words))
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.error


def test_a_folder_is_no_record(run, here):
    (here / "folder").mkdir()
    assert run("inspect", "folder").code == 2


def test_wrong_replays_of_a_target_are_a_failure(run, tiny, here):
    ended = run("inspect", f"{tiny}:leaks", "--mode", "decode")
    assert ended.code == 1
    assert "DECODE 2" in ended.out
    assert "replayed wrong; graphkit capture shows them" in ended.err


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


@pytest.mark.parametrize("words", [["--help"], ["inspect", "--help"], ["export", "--help"]])
def test_other_words_do_not_load_the_screen(words):
    code = (
        "import sys; from graphkit.cli import main\n"
        f"try: main({words!r})\n"
        "except SystemExit: pass\n"
        "sys.exit('textual' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0


def test_the_screen_is_shown_on_a_terminal_alone(run, saved, monkeypatch):
    """What it is given there; how it looks is tested with the screen."""
    shown = []

    class Screen:
        return_code = None

        def __init__(self, record, **which):
            shown.append((record.target, which))

        def run(self):
            pass

    monkeypatch.setattr("graphkit.tui.InspectApp", Screen)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    run("inspect", saved)
    monkeypatch.setattr("graphkit.cli.inspect._is_screen", lambda: True)
    assert run("inspect", saved, "--mode", "decode", "--batch-size", "2").out == ""
    assert shown == [("tiny", {"mode": "decode", "batch_size": 2})]
    assert json.loads(run("inspect", saved, "--json").out)["target"] == "tiny"
    assert len(shown) == 1
    monkeypatch.setattr(Screen, "return_code", 1)
    assert run("inspect", saved).code == 1
