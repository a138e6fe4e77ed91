"""Settings: every rule is enforced, and its error names the field, the value and the rule."""

from __future__ import annotations

import dataclasses
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from graphkit.config import BufferSizes
from graphkit.errors import ConfigError
from graphkit.spec import (
    CustomSpecAlgorithm,
    ForwardMode,
    SpecAlgorithm,
    SpecConfig,
)
from graphkit.spec.config import default_spec

FUZZ = settings(deadline=None, derandomize=True, max_examples=200)
STEPWISE = ("EAGLE", "EAGLE3", "STANDALONE")
FREE_WIDTH = ("NONE", "NGRAM", "DFLASH")
GOOD_SPEC = {"algorithm": "EAGLE", "num_steps": 3, "topk": 1, "num_draft_tokens": 4}
GOOD_SIZES = {
    "max_batch_size": 8,
    "max_context_len": 64,
    "hidden_size": 16,
    "vocab_size": 32,
    "dtype": torch.float32,
}
NOT_COUNTS = (0, -1, 1.0, True, "4", [4])


def largest_tree(steps, topk):
    """Count the nodes of the largest tree level by level, the root included."""
    return 1 + sum(topk if step == 0 else topk * topk for step in range(steps))


def error_of(cls, settings, field):
    with pytest.raises(ConfigError) as caught:
        cls(**settings)
    assert caught.value.field == field
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("field", ["topk", "num_draft_tokens", "page_size"])
@pytest.mark.parametrize("value", [*NOT_COUNTS, None])
def test_counts_of_a_spec_are_positive_ints(field, value):
    text = error_of(SpecConfig, {**GOOD_SPEC, field: value}, field)
    assert f"SpecConfig.{field} must be an int >= " in text
    assert f"got {value!r}" in text


def test_without_steps_only_the_root_is_verified():
    assert SpecConfig("EAGLE", 0, 1, 1).num_steps == 0
    assert SpecConfig("EAGLE", 0, 4, 1).topk == 4
    error_of(SpecConfig, {**GOOD_SPEC, "num_steps": 0, "topk": 4}, "num_draft_tokens")


@pytest.mark.parametrize("steps", [-1, 1.0, True, "4", None, False, 0.0])
def test_num_steps_is_an_int_of_at_least_zero(steps):
    spec = {**GOOD_SPEC, "num_steps": steps, "num_draft_tokens": 1}
    text = error_of(SpecConfig, spec, "num_steps")
    assert text == f"SpecConfig.num_steps must be an int >= 0, got {steps!r}."


@pytest.mark.parametrize("algorithm", STEPWISE)
@pytest.mark.parametrize("width", [3, 5])
def test_a_chain_has_one_draft_token_more_than_steps(algorithm, width):
    spec = {**GOOD_SPEC, "algorithm": algorithm, "num_draft_tokens": width}
    text = error_of(SpecConfig, spec, "num_draft_tokens")
    assert f"is {width}, but topk == 1 drafts a chain: it must be num_steps + 1 = 4." in text


@pytest.mark.parametrize("algorithm", STEPWISE)
@pytest.mark.parametrize(("steps", "topk", "largest"), [(1, 4, 5), (3, 2, 11), (5, 8, 265)])
def test_a_tree_has_no_more_nodes_than_its_steps_allow(algorithm, steps, topk, largest):
    assert SpecConfig(algorithm, steps, topk, largest).num_draft_tokens == largest
    spec = dict(zip(GOOD_SPEC, (algorithm, steps, topk, largest + 1), strict=True))
    text = error_of(SpecConfig, spec, "num_draft_tokens")
    assert f"is {largest + 1}, but {steps} steps of topk {topk} give at most" in text
    assert f"1 + K + (S - 1) * K * K = {largest} nodes" in text


@pytest.mark.parametrize("algorithm", FREE_WIDTH)
def test_other_algorithms_choose_their_width(algorithm):
    assert SpecConfig(algorithm, 3, 1, 16).num_draft_tokens == 16


@FUZZ
@given(st.data(), st.sampled_from(STEPWISE), st.integers(0, 6), st.integers(2, 6))
def test_every_tree_within_the_bound_is_accepted(data, algorithm, steps, topk):
    width = data.draw(st.integers(1, largest_tree(steps, topk)))
    assert SpecConfig(algorithm, steps, topk, width).num_draft_tokens == width


@FUZZ
@given(st.sampled_from([*STEPWISE, *FREE_WIDTH, "?"]), *[st.integers(-3, 9) | st.integers()] * 4)
def test_any_ints_give_a_valid_spec_or_a_config_error(algorithm, steps, topk, width, page):
    try:
        spec = SpecConfig(algorithm, steps, topk, width, page)
    except ConfigError:
        return
    assert steps >= 0
    assert min(topk, width, page) >= 1
    if spec.resolved.name in STEPWISE:
        assert width == steps + 1 if topk == 1 else steps > 9 or width <= largest_tree(steps, topk)


@pytest.mark.parametrize("algorithm", [None, 5, ["EAGLE"], CustomSpecAlgorithm, object()])
def test_an_algorithm_is_a_name_or_an_algorithm(algorithm):
    error_of(SpecConfig, {**GOOD_SPEC, "algorithm": algorithm}, "algorithm")


def test_a_spec_keeps_the_algorithm_and_cannot_be_changed():
    spec = SpecConfig("eagle", 3, 1, 4)
    assert spec.algorithm is SpecAlgorithm.EAGLE
    assert spec == SpecConfig(SpecAlgorithm.EAGLE, 3, 1, 4)
    assert hash(spec) == hash(SpecConfig("Eagle", 3, 1, 4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.topk = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "a chain"),
        ({"page_size": 64}, "a chain"),
        ({"topk": 2}, "a tree"),
        ({"topk": 2, "page_size": 16}, "a tree"),
        ({"linear_attention": True}, "a chain, if the target commits the recurrent state"),
        ({"linear_attention": True, "topk": 2}, "a tree, if the target commits the recurrent"),
    ],
)
def test_a_plan_is_v3_unless_the_host_is_needed(changes, reason):
    with warnings.catch_warnings(action="error"):
        spec = SpecConfig(**{**GOOD_SPEC, **changes})
    assert spec.plan().generation == "v3"
    assert spec.plan().reason.startswith(reason)
    refused = spec.plan("the grammar needs the host")
    assert refused.generation == "v2"
    assert refused.reason.startswith(reason)
    assert refused.reason.endswith("; v3 cannot run: the grammar needs the host")


@pytest.mark.parametrize(
    ("mode", "width"),
    [
        ("DECODE", 1),
        ("TARGET_VERIFY", 8),
        ("DRAFT", 2),
        ("DRAFT_EXTEND", 4),
        ("DRAFT_EXTEND_V2", 8),
    ],
)
def test_rows_per_request_by_mode(mode, width):
    assert SpecConfig("EAGLE", 3, 2, 8).tokens_per_request(ForwardMode[mode]) == width


def test_an_idle_batch_has_no_rows():
    with pytest.raises(ConfigError, match="IDLE has no rows"):
        SpecConfig("EAGLE", 3, 1, 4).tokens_per_request(ForwardMode.IDLE)


REQUIRED = ["max_batch_size", "max_context_len", "hidden_size", "vocab_size", "page_size"]
OPTIONAL = ["spec_hidden_size", "draft_vocab_size"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, value) for field in [*REQUIRED, *OPTIONAL] for value in NOT_COUNTS],
        *[(field, None) for field in REQUIRED],
        *[
            ("dtype", value)
            for value in (
                "float32",
                np.float32,
                np.dtype("f4"),
                None,
                torch.Size,
                torch.int8,
                torch.bool,
            )
        ],
    ],
)
def test_buffer_sizes_name_the_invalid_field(field, value):
    text = error_of(BufferSizes, {**GOOD_SIZES, field: value}, field)
    assert f"BufferSizes.{field} must be" in text
    assert re.search(f"got {re.escape(repr(value))}", text)


def test_buffer_sizes_count_pages():
    pages = {page: BufferSizes(**GOOD_SIZES, page_size=page).max_pages for page in (1, 5, 63, 64)}
    assert pages == {1: 64, 5: 13, 63: 2, 64: 1}


@pytest.mark.parametrize("algorithm", STEPWISE)
@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, (0, 1), (1, 2)], ids=str)
def test_the_default_width_is_a_width_that_the_steps_create(algorithm, topk, steps):
    spec = default_spec(algorithm, steps, topk)
    most = largest_tree(spec.longest.num_steps, topk)
    assert spec.longest.num_draft_tokens == min(most, (spec.longest.num_steps + 1) * min(topk, 2))
