"""The arguments of ``graphkit record`` and of its program, and the messages about the record."""

from __future__ import annotations

import pytest

from graphkit.records import AuditReport, ForeignRecord


@pytest.mark.parametrize(
    ("arguments", "out", "programs"),
    [
        (["s.py", "a", "b"], "graphkit-record.json", ["a", "b"]),
        (["--out", "r.json", "s.py", "-a"], "r.json", ["-a"]),
        (["--out=r.json", "s.py", "--o", "x"], "r.json", ["--o", "x"]),
        (["s.py", "--out", "b"], "graphkit-record.json", ["--out", "b"]),
        (["s.py", "a", "--", "b"], "graphkit-record.json", ["a", "--", "b"]),
        (["--out", "r.json", "--", "s.py", "--out", "b"], "r.json", ["--out", "b"]),
        (["--out", "r.json", "-m", "s", "-a"], "r.json", ["-a"]),
        (["-m", "s", "-m", "x", "--help"], "graphkit-record.json", ["-m", "x", "--help"]),
    ],
)
def test_the_program_gets_the_other_arguments(
    run, program, here, arguments, out, programs, graphs_in
):
    program("import sys; from fake_capture import capture; capture(repr(sys.argv[1:]))")
    ended = run("record", *arguments)
    assert (ended.code, ended.err) == (0, f"recorded 1 graph of 1 process: wrote {out}\n")
    assert [path.name for path in here.glob("*.json")] == [out]
    assert graphs_in(out) == [(repr(programs), 0)]
    start = ["-m", "s"] if "-m" in arguments[:3] else ["s.py"]
    assert list(ForeignRecord.load(here / out).command) == [*start, *programs]


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("-m",), ("--out",), ("--out", "r.json"), ("absent.py",), ("--", "absent.py"),
        ("--nothing", "s.py"),
        ("--out", "absent/r.json", "s.py"),
        ("--every", "2", "s.py"), ("--find-fault", "s.py"), ("--json", "s.py"),
        ("--fail-on", "error", "s.py"), ("--audit", "--every", "-1", "s.py"),
    ],
)  # fmt: skip
def test_wrong_arguments_run_nothing(run, program, here, arguments):
    program("open('ran', 'w')")
    ended = run("record", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "error: " in ended.err
    assert [path.name for path in here.iterdir()] == ["s.py"]


def test_a_missing_script_is_named(run, here):
    assert (
        run("record", "absent.py").error == "error: cannot run absent.py: the file does not exist."
    )


def test_a_missing_module_is_reported_by_python(here, record_in_shell):
    done = record_in_shell("-m", "no_such_module_at_all")
    assert done.returncode == 1
    assert "No module named no_such_module_at_all" in done.stderr


def test_a_python_without_the_entry_point_is_refused(run, program, monkeypatch):
    monkeypatch.setattr("graphkit.audit.foreign.launch.entry_points", lambda **_: ())
    ended = run("record", program("print('ran')"))
    assert (ended.code, ended.out) == (2, "")
    assert ended.error.startswith("error: cannot record: graphkit is not installed")


@pytest.mark.parametrize(
    ("has_device", "why"),
    [(False, "torch sees no CUDA device"), (True, "the program captured no graph")],
)
def test_why_a_program_with_torch_has_no_graph(run, program, here, monkeypatch, has_device, why):
    """The program imports a stand-in for torch, which takes no time to load."""
    package = here / "torch" / "cuda"
    package.mkdir(parents=True)
    (here / "torch" / "__init__.py").write_text(
        "from torch.cuda import graphs\nfrom graphkit.autoload import begin_audit\nbegin_audit()\n"
    )
    (package / "__init__.py").touch()
    (package / "graphs.py").write_text(
        "class CUDAGraph:\n"
        "    def capture_begin(self): pass\n"
        "    def capture_end(self): pass\n"
        "    def raw_cuda_graph(self): pass\n"
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_device)
    ended = run("record", program("import torch; raise SystemExit(4)"))
    assert (ended.code, ended.err) == (4, f"nothing recorded: {why}\n")
    assert not list(here.glob("*.json"))


def test_a_record_that_cannot_be_written_is_a_usage_error(run, program, here, monkeypatch):
    program("import os; from fake_capture import capture; capture('a'); os.mkdir('r.json')")
    ended = run("record", "--out", "r.json", "s.py")
    assert ended.code == 2
    assert "cannot write r.json" in ended.err


@pytest.mark.parametrize("options", [(), ("--fail-on", "error"), ("--json",)])
@pytest.mark.parametrize("out", ["r.json", "old.json"])
def test_an_audit_of_nothing_exits_with_3(run, program, here, options, out):
    (here / "old.json").write_text("the report of an earlier run")
    program("print('program')")
    ended = run("record", "--audit", "--out", out, *options, "s.py")
    why = "the program did not import torch"
    assert ended.code == 3
    assert f"nothing audited: {why}\n" in ended.err
    report = AuditReport.load(here / out)
    assert [check.text for check in report.checks] == [f"not checked: {why}"]
    if "--json" in options:
        assert AuditReport.from_json(ended.out) == report


def test_an_audit_of_nothing_keeps_the_exit_code_of_a_failed_program(run, program):
    program("raise SystemExit(4)")
    ended = run("record", "--audit", "--out", "r.json", "--fail-on", "error", "--json", "s.py")
    assert ended.code == 4
    assert "nothing audited: " in ended.err
    assert not AuditReport.from_json(ended.out).findings


@pytest.mark.parametrize(("own_code", "code"), [(0, 2), (5, 5)])
def test_an_audit_whose_report_cannot_be_written_fails(run, program, here, own_code, code):
    program(f"import os; os.mkdir('r.json'); raise SystemExit({own_code})")
    ended = run("record", "--audit", "--out", "r.json", "--json", "s.py")
    assert ended.code == code
    assert "error: cannot write r.json: Is a directory." in ended.err
    assert AuditReport.from_json(ended.out).checks
