"""What runners log: captures, and the first batch that falls back for each reason."""

from __future__ import annotations

import logging

import pytest

from graphkit import ReplayError


@pytest.fixture
def logged(caplog):
    """Return (logger, level, text) of all records of graphkit so far, and forget them."""
    caplog.set_level(logging.INFO, logger="graphkit")

    def take():
        found = [
            (record.name, record.levelno, record.getMessage())
            for record in caplog.records
            if record.name.startswith("graphkit")
        ]
        caplog.clear()
        return found

    return take


def test_the_package_has_a_handler_that_does_nothing():
    handlers = logging.getLogger("graphkit").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
    assert logging.getLogger("graphkit").level == logging.NOTSET


def test_a_capture_logs_sizes_time_and_memory(make_runner, logged):
    record = make_runner().capture()
    begin, end = logged()
    name = "graphkit.runners.capture"
    assert begin == (name, logging.INFO, "Capturing TARGET_VERIFY of Model, up to batch size 4.")
    sizes = record.modes[0].sizes
    seconds = sum(size.capture_ms for size in sizes) / 1e3
    mebibytes = sum(size.pool_bytes for size in sizes) / 2**20
    assert end[:2] == (name, logging.INFO)
    assert end[2] == (
        f"Captured TARGET_VERIFY of Model at batch sizes 1, 2, 4 in {seconds:.1f} s; "
        f"its graphs take {mebibytes:.1f} MiB."
    )


def test_every_size_is_logged_for_those_who_debug(make_runner, caplog):
    caplog.set_level(logging.DEBUG, logger="graphkit")
    make_runner().capture()
    texts = [record.getMessage() for record in caplog.records]
    assert [text.split(" in ")[0] for text in texts if " ms." in text] == [
        "Captured TARGET_VERIFY of Model at 4",
        "Captured TARGET_VERIFY of Model at 2",
        "Captured TARGET_VERIFY of Model at 1",
    ]


def test_the_first_fallback_of_each_reason_is_logged(make_runner, make_batch, logged):
    runner = make_runner()
    for _ in range(2):
        runner.run(make_batch(2))
    ((name, level, text),) = logged()
    assert (name, level) == ("graphkit.runners.dispatch", logging.WARNING)
    assert text == (
        "TARGET_VERIFY falls back to eager: the runner is planned, not captured. Logged once."
    )
    runner.capture()
    logged()
    for requests in (6, 2, 7):
        runner.run(make_batch(requests))
    ((_, _, text),) = logged()
    assert "the batch has 6 requests; the largest captured size is 4" in text
    assert runner.stats.fallbacks == {"not captured": 2, "batch too large": 2}


def test_a_reason_is_explained_once(make_runner, make_batch, monkeypatch):
    runner = make_runner()
    reasons, explain = [], runner.dispatch.explain
    monkeypatch.setattr(
        runner.dispatch, "explain", lambda *args: reasons.append(args) or explain(*args)
    )
    for _ in range(3):
        runner.run(make_batch(2))
    assert len(reasons) == 1


def test_runs_that_are_not_counted_are_not_logged(make_runner, make_batch, logged):
    runner = make_runner()
    with runner.without_stats():
        runner.run(make_batch(2))
    assert not logged()
    assert not runner.stats.fallbacks
    runner.run(make_batch(2))
    assert len(logged()) == 1


def test_replays_and_refusals_log_nothing(make_runner, make_batch, logged):
    runner = make_runner()
    runner.capture()
    logged()
    runner.replay(make_batch(2))
    runner.run(make_batch(3))
    runner.stage(1)
    runner.close()
    with pytest.raises(ReplayError):
        runner.run(make_batch(2))
    assert not logged()
