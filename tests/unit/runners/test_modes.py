"""DECODE and TARGET_VERIFY: rows per request, sizes, and what the settings imply."""

from __future__ import annotations

import numpy as np
import pytest

from graphkit import (
    ConfigError,
    CustomSpecAlgorithm,
    DecodeRunner,
    ForwardMode,
    SpecConfig,
    TargetVerifyRunner,
    register_algorithm,
)
from graphkit.spec import algorithms


class Medusa(CustomSpecAlgorithm):
    """One row more on the target's side; its draft worker may verify."""

    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
        return num_draft_tokens + (0 if is_draft_worker else 1)

    def supports_target_verify_for_draft(self):
        return True


class Broken(CustomSpecAlgorithm):
    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
        return 0


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(algorithms, "_custom", {})
    register_algorithm("medusa", Medusa)
    register_algorithm("broken", Broken)


@pytest.mark.parametrize(
    "settings",
    [("NONE", 0, 1, 1), ("EAGLE", 3, 1, 4), ("EAGLE", 3, 2, 4), ("medusa", 0, 1, 4)],
)
def test_decode_has_one_row_per_request(make_runner, make_batch, expect, assert_same, settings):
    runner = make_runner(cls=DecodeRunner, spec=SpecConfig(*settings))
    assert (runner.mode, runner.tokens_per_request) == (ForwardMode.DECODE, 1)
    record = runner.capture()
    assert [(s.batch_size, s.num_tokens) for s in record.modes[0].sizes] == [(1, 1), (2, 2), (4, 4)]
    assert record.modes[0].mode == "DECODE"
    assert runner.buffers.view(4).custom_mask is None
    for requests in (3, 1, 4):
        batch = make_batch(requests, 1, seed=requests)
        assert_same(runner.replay(batch), expect(batch))


@pytest.mark.parametrize(
    ("settings", "is_draft_worker", "width"),
    [
        (("EAGLE", 3, 1, 4), False, 4),
        (("EAGLE3", 5, 1, 6), False, 6),
        (("NGRAM", 0, 1, 7), False, 7),
        (("NONE", 0, 1, 1), False, 1),
        (("DFLASH", 0, 1, 5), True, 5),
        (("medusa", 0, 1, 4), False, 5),
        (("medusa", 0, 1, 4), True, 4),
    ],
)
def test_verify_has_the_rows_that_its_algorithm_says(
    make_runner, make_batch, expect, assert_same, settings, is_draft_worker, width
):
    runner = make_runner(spec=SpecConfig(*settings, is_draft_worker=is_draft_worker))
    assert (runner.mode, runner.tokens_per_request) == (ForwardMode.TARGET_VERIFY, width)
    record = runner.capture()
    assert record.modes[0].tokens_per_request == width
    assert [s.num_tokens for s in record.modes[0].sizes] == [width, 2 * width, 4 * width]
    batch = make_batch(3, width)
    assert_same(runner.replay(batch), expect(batch))
    assert runner.stats.padded_rows == width


@pytest.mark.parametrize(
    "settings", [("EAGLE", 3, 1, 4), ("NGRAM", 0, 1, 4), ("STANDALONE", 3, 1, 4)]
)
def test_a_draft_worker_verifies_only_if_its_algorithm_lets_it(make_runner, settings):
    spec = SpecConfig(*settings, is_draft_worker=True)
    with pytest.raises(ConfigError, match="draft worker cannot capture TARGET_VERIFY") as caught:
        make_runner(spec=spec)
    assert caught.value.field == "is_draft_worker"
    assert settings[0] in str(caught.value)
    make_runner(cls=DecodeRunner, spec=spec)


def test_a_width_below_one_is_refused(make_runner):
    with pytest.raises(ConfigError, match=r"get_num_tokens_per_bs_for_target_verify.*got 0"):
        make_runner(spec=SpecConfig("broken", 0, 1, 4))


def test_a_tree_implies_its_mask(make_runner, make_batch, expect, assert_same):
    runner = make_runner(spec=SpecConfig("EAGLE", 3, 2, 6))
    assert runner.implied_fields() == ("custom_mask",)
    runner.capture()
    assert runner.buffers.view(2).custom_mask.shape == (2, 6, 6)
    for seed in range(3):
        mask = np.random.default_rng(seed).integers(0, 2, (3, 6, 6)).astype(bool)
        batch = make_batch(3, 6, seed=seed, custom_mask=mask)
        assert_same(runner.replay(batch), expect(batch))
    assert runner.buffers.view(4).custom_mask[3].all(), "a pad row that sees nothing makes NaN"


def test_a_chain_has_no_mask_unless_asked(make_runner):
    assert make_runner().buffers.view(1).custom_mask is None
    assert make_runner(optional_fields=["custom_mask"]).buffers.view(1).custom_mask is not None
    tree = SpecConfig("EAGLE", 3, 2, 6)
    assert make_runner(spec=tree, optional_fields=[]).buffers.view(1).custom_mask is None


@pytest.mark.parametrize("cls", [DecodeRunner, TargetVerifyRunner])
def test_sizes_are_rounded_up_to_a_multiple(make_runner, make_batch, expect, assert_same, cls):
    runner = make_runner(cls=cls, multiple_of=3)
    record = runner.capture()
    assert [size.batch_size for size in record.modes[0].sizes] == [3, 6]
    width = runner.tokens_per_request
    for requests, padded in [(1, 3), (3, 3), (4, 6), (6, 6)]:
        batch = make_batch(requests, width)
        assert runner.can_replay(batch).padded_batch_size == padded
        assert_same(runner.replay(batch), expect(batch))
    assert runner.run(make_batch(7, width)).next_token_logits.shape[0] == 7 * width
    assert runner.stats.fallbacks == {"batch too large": 1}


def test_the_fields_list_of_sizes_is_the_default(make_runner):
    assert list(make_runner(batch_sizes=None).table) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"optional_fields": ["seq_lens"]}, "optional_fields"),
        ({"batch_sizes": [5]}, "batch_sizes"),
        ({"batch_sizes": [2, 2]}, "batch_sizes"),
        ({"multiple_of": 0}, "multiple_of"),
    ],
)
def test_settings_that_contradict(make_runner, options, field):
    with pytest.raises(ConfigError) as caught:
        make_runner(**options)
    assert caught.value.field == field
