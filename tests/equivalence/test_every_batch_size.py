"""Every live batch size, at every captured size that may hold it."""

import pytest


@pytest.mark.slow
def test_every_live_size_runs_at_the_smallest_size_that_holds_it(capture):
    captured = capture()
    table = captured.runner.table
    for live in range(1, table.max_batch_size + 1):
        batch = captured.batch(live, live)
        assert captured.runner.can_replay(batch).padded_batch_size == table.fit(live)
        captured.poison()
        captured.assert_right(batch)
    assert captured.runner.stats.replays_by_size.keys() == set(table)


@pytest.mark.slow
def test_every_captured_size_takes_every_smaller_batch(capture):
    captured = capture()
    for size in (3, 7, 16):
        for live in range(1, size + 1):
            captured.poison()
            captured.assert_right(captured.batch(live, 100 + live), size)


@pytest.mark.slow
def test_the_empty_batch_gives_empty_rows(capture):
    captured = capture()
    batch, before = captured.batch(1, 0), captured.runner.stats.replays
    idle = type(batch)(**{name: rows[:0] for name, rows in vars(batch).items() if rows is not None})
    full, empty = captured.replay(batch), captured.replay(idle)
    assert {name: (0, *rows.shape[1:]) for name, rows in full.items()} == {
        name: tuple(rows.shape) for name, rows in empty.items()
    }
    assert captured.runner.stats.replays == before + 1
