"""Output files: refused before the work, written whole or not at all, and nothing else touched."""

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
    """``write(path)`` makes a command write there; the record of another run lies beside."""
    words = {"capture": ("capture", "no_such_module_here:x"), "export": ("export", saved)}

    def command(path):
        return run(*words[request.param], "--out", path)

    return command


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("missing/out.json", "folder missing does not exist. Make it."),
        ("folder.json", "it is a folder. Name a file."),
        (".", "it is a folder"),
        ("record.json/out.json", "folder record.json does not exist"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(write, here, path, text):
    (here / "folder.json").mkdir()
    ended = write(path)
    assert (ended.code, ended.out) == (2, "")
    assert f"cannot write {path}: {text}" in ended.error
    assert names_in(here) == ["folder.json", "record.json"]


@pytest.mark.parametrize(("closed", "before"), [("out.json", "old"), (".", "old"), (".", None)])
def test_a_closed_place_is_refused_before_the_work(write, here, monkeypatch, closed, before):
    """Told by the system's answer, because the superuser may write anywhere.

    A file is replaced by another one beside it, so its folder must be open, too.
    """
    out, shut = here / "out.json", (here / closed).resolve()
    if before:
        out.write_text(before)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != shut)
    ended = write("out.json")
    assert (ended.code, ended.out) == (2, "")
    assert f"cannot write out.json: no permission to write {closed}. " in ended.error
    assert not before or out.read_text() == before


def test_a_device_in_a_closed_folder_can_be_written(run, tiny, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != Path("/dev"))
    ended = run("capture", f"{tiny}:right", "--mode", "decode", "--out", "/dev/null")
    assert (ended.code, ended.err) == (0, "wrote /dev/null\n")


def test_a_link_stays_and_what_it_leads_to_is_written(run, saved, here):
    (here / "folder").mkdir()
    (here / "out.json").symlink_to("folder/linked.json")
    for _ in range(2):  # the file that the link leads to is not there at first
        assert run("export", saved, "--out", "out.json").code == 0
        assert (here / "out.json").is_symlink()
        assert names_in(here / "folder") == ["linked.json"]
        assert CaptureRecord.load("folder/linked.json") == CaptureRecord.load(saved)


@pytest.mark.parametrize(("accident", "code"), [(full_disk, 2), (interruption, 1)])
@pytest.mark.parametrize("before", [None, "before"])
def test_an_accident_leaves_the_old_file_and_no_other(
    run, saved, here, monkeypatch, accident, code, before
):
    out = here / "out.json"
    if before:
        out.write_text(before)
    monkeypatch.setattr(Path, "replace", accident)
    ended = run("export", saved, "--out", out)
    assert ended.code == code
    assert ended.error
    assert names_in(here) == ["out.json", "record.json"][not before :]
    assert not before or out.read_text() == before


def test_a_file_is_replaced_and_named_on_stderr(run, saved, here):
    (here / "out.json").write_text("x" * 100_000)
    ended = run("export", saved, "--out", "out.json")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "wrote out.json\n"
    assert CaptureRecord.load(here / "out.json") == CaptureRecord.load(saved)
    assert names_in(here) == ["out.json", "record.json"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_is_as_readable_as_the_user_wants(run, saved, here, mask, mode):
    old = os.umask(mask)
    try:
        assert run("export", saved, "--out", "out.json").code == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE((here / "out.json").stat().st_mode) == mode


def test_a_pipe_or_device_is_never_replaced_by_a_file(run, saved, here):
    """Else ``--out /dev/null`` would cost the superuser that device."""
    os.mkfifo(here / "pipe.json")
    reader = os.open(here / "pipe.json", os.O_RDONLY | os.O_NONBLOCK)
    try:
        run("export", saved, "--out", "pipe.json")
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((here / "pipe.json").stat().st_mode)
