"""Every live batch size, at every captured size that may hold it."""

import pytest

from graphkit.spec import ForwardMode

SIZE_LISTS = [None, [32], [1, 2, 4, 8, 16, 32], [3, 7, 20, 32]]


@pytest.mark.parametrize("sizes", SIZE_LISTS, ids=["default", "largest", "powers", "odd"])
def test_every_live_size_equals_eager(verify, target, assert_right, poison, sizes):
    runner = verify(sizes)
    for live in range(1, runner.table.max_batch_size + 1):
        batch = target.sample_batch(ForwardMode.TARGET_VERIFY, live, live)
        assert runner.can_replay(batch).padded_batch_size == runner.table.fit(live)
        poison(runner)
        assert_right(runner, batch, runner.replay(batch))


def test_the_empty_batch_gives_empty_rows(verify, target):
    runner = verify([32])
    batch = target.sample_batch(ForwardMode.TARGET_VERIFY, 1, 0)
    idle = type(batch)(**{name: rows[:0] for name, rows in vars(batch).items() if rows is not None})
    output = runner.replay(idle)
    assert output.next_token_logits.shape == (0, target.sizes.vocab_size)
    assert output.hidden_states.shape == (0, target.sizes.hidden_size)
    assert runner.stats.replays == 0


def test_a_batch_gives_the_same_rows_at_every_size_that_holds_it(verify, target, assert_right):
    runner = verify([4, 8, 32])
    batch = target.sample_batch(ForwardMode.TARGET_VERIFY, 3, 3)
    for size in (4, 8, 32):
        replayed = runner.replay(batch, padded_batch_size=size, clone=True)
        eager = runner.fall_back(batch)
        assert replayed.next_token_logits.argmax(-1).equal(eager.next_token_logits.argmax(-1))


def test_decode_is_verify_of_width_one(verify, target, assert_right):
    runner = verify([1, 8, 32], ForwardMode.DECODE)
    for live in (1, 2, 8, 9, 32):
        batch = target.sample_batch(ForwardMode.DECODE, live, live)
        assert_right(runner, batch, runner.replay(batch))
