"""Output files: checked before the work, written completely or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from graphkit.records import CaptureRecord


def full_disk(self, target):
    raise OSError(errno.ENOSPC, "No space left on device")


def interruption(self, target):
    raise KeyboardInterrupt


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["capture", "export"])
def write(request, run, saved, here):
    """Return ``write(path)``, which runs a command with ``--out path``."""
    arguments = {"capture": ("capture", "no_such_module_here:x"), "export": ("export", saved)}

    def command(path):
        return run(*arguments[request.param], "--out", path)

    return command


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("missing/out.json", "folder missing does not exist. Create the folder first."),
        ("folder.json", "it is a folder. Name a file."),
        (".", "it is a folder"),
        ("record.json/out.json", "folder record.json does not exist"),
    ],
)
def test_an_impossible_path_is_refused_before_the_work(write, here, path, text):
    (here / "folder.json").mkdir()
    ended = write(path)
    assert (ended.code, ended.out) == (2, "")
    assert f"cannot write {path}: {text}" in ended.error
    assert names_in(here) == ["folder.json", "record.json"]


@pytest.mark.parametrize(("closed", "before"), [("out.json", "old"), (".", "old"), (".", None)])
def test_missing_permission_is_refused_before_the_work(write, here, monkeypatch, closed, before):
    """Imitate the system's answer, because the superuser may write anywhere.

    The folder of a file must be writable too: the file is replaced by a new one.
    """
    out, closed_path = here / "out.json", (here / closed).resolve()
    if before:
        out.write_text(before)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != closed_path)
    ended = write("out.json")
    assert (ended.code, ended.out) == (2, "")
    assert f"cannot write out.json: no permission to write {closed}. " in ended.error
    assert not before or out.read_text() == before


def test_a_device_in_a_read_only_folder_can_be_written(run, tiny, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("/dev"))
    ended = run("capture", f"{tiny}:right", "--mode", "decode", "--out", "/dev/null")
    assert (ended.code, ended.messages) == (0, ["wrote /dev/null"])


def test_a_link_is_kept_and_its_target_is_written(run, saved, here):
    (here / "folder").mkdir()
    (here / "out.json").symlink_to("folder/linked.json")
    for _ in range(2):  # the first time, the target does not exist
        assert run("export", saved, "--out", "out.json").code == 0
        assert (here / "out.json").is_symlink()
        assert names_in(here / "folder") == ["linked.json"]
        assert CaptureRecord.load("folder/linked.json") == CaptureRecord.load(saved)


@pytest.mark.parametrize(("failure", "code"), [(full_disk, 2), (interruption, 130)])
@pytest.mark.parametrize("before", [None, "before"])
def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(
    run, saved, here, monkeypatch, failure, code, before
):
    out = here / "out.json"
    if before:
        out.write_text(before)
    monkeypatch.setattr(Path, "replace", failure)
    ended = run("export", saved, "--out", out)
    assert ended.code == code
    assert ended.error
    assert names_in(here) == ["out.json", "record.json"][not before :]
    assert not before or out.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        (("bench",), "graphkit.cli.bench._measure"),
        (("capture",), "graphkit.cli.capture.select_target"),
        (("audit",), "graphkit.cli.audit.select_target"),
        (("record", __file__), "graphkit.audit.foreign.record_program"),
        (("record", "--audit", __file__), "graphkit.audit.foreign.audit_program"),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each[:2]),
)
@pytest.mark.parametrize("before", [None, "before"])
def test_work_that_is_cut_leaves_the_old_file_or_none(
    run, here, monkeypatch, arguments, work, before
):
    if before:
        (here / "out.json").write_text(before)
    monkeypatch.setattr(work, lambda *_, **__: interruption(None, None))
    command, *program = arguments
    assert run(command, "--out", "out.json", *program).code == 130
    assert names_in(here) == ["out.json"][not before :]
    assert not before or (here / "out.json").read_text() == before


def test_a_file_is_replaced_and_named_on_stderr(run, saved, here):
    (here / "out.json").write_text("x" * 100_000)
    ended = run("export", saved, "--out", "out.json")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "wrote out.json\n"
    assert CaptureRecord.load(here / "out.json") == CaptureRecord.load(saved)
    assert names_in(here) == ["out.json", "record.json"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_permissions_of_the_umask(run, saved, here, mask, mode):
    old = os.umask(mask)
    try:
        assert run("export", saved, "--out", "out.json").code == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE((here / "out.json").stat().st_mode) == mode


def test_a_pipe_or_device_is_never_replaced_by_a_file(run, saved, here):
    """Otherwise ``--out /dev/null`` would delete that device for the superuser."""
    os.mkfifo(here / "pipe.json")
    reader = os.open(here / "pipe.json", os.O_RDONLY | os.O_NONBLOCK)
    try:
        run("export", saved, "--out", "pipe.json")
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((here / "pipe.json").stat().st_mode)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".json"])
def test_a_name_that_no_file_can_have_is_refused_before_the_work(run, here, name):
    ended = run("capture", "no_such_module:target", "--out", name)
    assert (ended.code, ended.out) == (2, "")
    assert ended.error == f"error: cannot write {name}: File name too long."
