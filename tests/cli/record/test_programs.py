"""A program behaves as under plain Python, and the graphs of its processes are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from graphkit.records import ForeignRecord

PRINT_STATE = """
import json, os, sys
print(json.dumps([sys.argv, sys.path, __name__, __file__, os.getcwd(), sys.flags.quiet,
    sys.warnoptions, sys.dont_write_bytecode, sys.stdin.read()]))
print("to stderr", file=sys.stderr)
sys.exit(9)
"""

CHILDREN = """
import multiprocessing, os, subprocess, sys
from fake_capture import capture

if __name__ == "__main__":
    capture("parent")
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=capture, args=[method])
        child.start()
        child.join()
    code = "from fake_capture import capture; capture('subprocess')"
    subprocess.run([sys.executable, "-c", code], check=True)
    pid = os.fork()
    if not pid:
        capture("os.fork")
        os._exit(0)
    os.waitpid(pid, 0)
    capture("parent again")
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", [("s.py",), ("-m", "s")])
def test_a_program_behaves_as_under_plain_python(program, start, record_in_shell):
    program(PRINT_STATE)
    options = ("-B", "-q", "-W", "ignore::ImportWarning")
    given = (*start, "a", "-v", "--x=1", "", "-h")
    plain = subprocess.run(
        [sys.executable, *options, *given], input="text", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    done = record_in_shell(*given, options=options, input="text")
    assert plain.returncode == done.returncode == 9
    assert done.stdout == plain.stdout
    message = "nothing recorded: the program did not import torch\n"
    assert done.stderr == plain.stderr + message


@pytest.mark.slow
def test_open_files_stay_open(program, record_in_shell):
    program("import os, sys; os.write(int(sys.argv[1]), b'through')")
    read, write = os.pipe()
    assert record_in_shell("s.py", str(write), pass_fds=[write]).returncode == 0
    assert os.read(read, 100) == b"through"
    os.close(read)
    os.close(write)


@pytest.mark.slow
def test_a_recording_is_no_audit(program, record_in_shell, monkeypatch):
    """Graphs are recorded or audited: an exported variable does not replace the recording."""
    monkeypatch.setenv("GRAPHKIT_AUDIT", "report.json")
    program("import os; print(repr(os.environ['GRAPHKIT_AUDIT']))")
    assert record_in_shell("s.py").stdout == "''\n"


def test_children_are_recorded_too(program, here, graphs_in, record_in_shell):
    done = record_in_shell(program(CHILDREN))
    assert done.returncode == 0
    assert done.stderr == "recorded 6 graphs of 5 processes: wrote graphkit-record.json\n"
    assert graphs_in() == [
        ("parent", 0), ("parent again", 0), ("fork", 1), ("spawn", 2), ("subprocess", 3),
        ("os.fork", 4),
    ]  # fmt: skip
    processes = ForeignRecord.load(here / "graphkit-record.json").processes
    assert len({process.pid for process in processes}) == 5
    assert processes[0].command[-1] == "s.py"
    assert processes[3].command[1] == "-c"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(5)", 5),
        ("raise ValueError('bad')", 1),
        ("os._exit(6)", 6),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.kill(os.getpid(), 15)", 143),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_graphs_are_kept_however_the_program_ends(run, program, here, end, code):
    program(f"import os; from fake_capture import capture; capture('a'); {end}")
    ended = run("record", "s.py")
    assert ended.code == code
    assert ended.err == "recorded 1 graph of 1 process: wrote graphkit-record.json\n"
    record = ForeignRecord.load(here / "graphkit-record.json")
    assert (record.exit_code, record.graphs[0].name) == (code, "a")


def test_an_incomplete_graph_is_left_out_and_reported(run, program, here, graphs_in):
    source = (
        "import os; from fake_capture import capture; print(os.getpid(), file=open('pid', 'w'))"
    )
    program(f"{source}; capture('a'); capture('b', lambda: os._exit(6))")
    ended = run("record", "s.py")
    pid = (here / "pid").read_text().strip()
    assert ended.code == 6
    assert ended.err.splitlines() == [
        f"left out 1 graph of process {pid}: not written completely",
        "recorded 1 graph of 1 process: wrote graphkit-record.json",
    ]
    assert graphs_in() == [("a", 0)]


def test_without_a_complete_graph_no_file_is_written(run, program, here):
    program("import os; from fake_capture import capture; capture('b', lambda: os._exit(6))")
    ended = run("record", "s.py")
    assert ended.code == 6
    assert ended.err.splitlines()[1:] == ["nothing recorded: no graph was written completely"]
    assert not list(here.glob("*.json"))


def test_the_command_leaves_nothing_behind(run, program, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert run("record", program("from fake_capture import capture; capture('a')")).code == 0
    assert list((tmp_path / "temporary").iterdir()) == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
