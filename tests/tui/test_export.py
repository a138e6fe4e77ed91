"""Export of a page to a text file."""

from __future__ import annotations

import os
import resource

import pytest

from graphkit.views.tui.export import unused_name, write_new


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_export_has_every_row_and_column_and_its_path_is_shown(capture, drive, here):
    async def script(on):
        await on.press("down", "enter", "+", "s", "s", "e")
        await on.press("enter")
        return on.listing, on.status

    listing, said = drive(capture, script, size=(60, 24))
    (file,) = here.iterdir()
    assert said.replace(" ", "") == f"wrote{file}", "on as many lines as it takes"
    assert file.name == "graphkit-tiny-target-verify-1.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "tiny > TARGET_VERIFY 1 · row 43/46 · tab 1/3 · sort nodes"
    rows = lines[lines.index("") + 2 :]
    assert len(rows) == len(listing.lines) == 46
    assert "module and node" in lines[lines.index("") + 1]
    assert "source" in lines[lines.index("") + 1], "columns that the terminal has no room for"
    assert sum("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT" in row for row in rows) == 12


def test_the_user_may_choose_the_name(capture, drive, here):
    async def script(on):
        await on.press("e")
        await on.answer("a file.txt")
        return on.status

    assert drive(capture, script, size=(200, 24)) == f"wrote {here / 'a file.txt'}"
    assert (here / "a file.txt").read_text(encoding="utf-8").startswith("tiny · row 1/8\n")


def test_without_a_name_no_file_is_written(capture, drive, here):
    async def script(on):
        for keys in (("escape",), ("ctrl+u", "enter"), ("ctrl+u", " ", "enter")):
            await on.press("e", *keys)
            assert (on.app.focused, on.status) == (None, "row 1/8")

    drive(capture, script)
    assert list(here.iterdir()) == []


def test_the_suggested_name_is_unused(here):
    path = ("reference model", "TARGET_VERIFY 8")
    assert unused_name(path) == "graphkit-reference-model-target-verify-8.txt"
    (here / unused_name(path)).write_text("")
    assert unused_name(path) == "graphkit-reference-model-target-verify-8-2.txt"
    assert unused_name(("../../etc",)) == "graphkit-etc.txt"
    assert len(unused_name(("x" * 500,))) < 100


def test_an_existing_file_is_not_overwritten(here):
    (here / "kept.txt").write_text("before")
    assert write_new("kept.txt", "after") == "kept.txt exists: choose another name"
    assert (here / "kept.txt").read_text() == "before"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/out.txt", "No such file or directory"),
        (".", "exists"),
        ("x" * 300, "File name too long"),
        ("nul\0byte", "null byte"),
        ("~nobody-of-that-name/out.txt", "cannot write"),
    ],
)
def test_a_name_that_cannot_be_written_is_refused_with_the_reason(here, name, reason):
    said = write_new(name, "text")
    assert reason in said
    assert not said.startswith("wrote")
    assert list(here.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_closed_folder_is_refused(here):
    (here / "closed").mkdir(mode=0o500)
    assert "Permission denied" in write_new("closed/out.txt", "text")


def test_a_full_disk_keeps_no_partial_file(here):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        said = write_new("out.txt", "more than ten bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == "cannot write out.txt: File too large"
    assert list(here.iterdir()) == []
