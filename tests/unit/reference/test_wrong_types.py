"""Arguments of wrong types, and devices that do not exist, raise errors of graphkit."""

from __future__ import annotations

import pytest

from graphkit import ConfigError
from graphkit.reference import (
    dflash_target,
    eagle3_target,
    random_models,
    reference_engine,
    reference_target,
)


@pytest.mark.parametrize("algorithm", [3, None, ["EAGLE"], "EAGLE4"])
def test_an_algorithm_is_one_of_the_names(algorithm):
    with pytest.raises(ConfigError, match="has no reference drafter") as caught:
        reference_engine(algorithm, device="cpu")
    assert caught.value.field == "algorithm"


@pytest.mark.parametrize("shape", [3, ["tiny"], None])
def test_a_shape_is_one_of_the_names(shape):
    with pytest.raises(ConfigError, match="unknown shape"):
        random_models(shape, device="cpu")


@pytest.mark.parametrize("num_steps", [[1, "3"], ["3", 1], [], ["3"]], ids=str)
def test_draft_lengths_are_ints(num_steps):
    with pytest.raises(ConfigError) as caught:
        reference_engine("EAGLE", num_steps=num_steps, device="cpu")
    assert caught.value.field in ("num_steps", "num_draft_tokens")


@pytest.mark.parametrize(
    "create",
    [
        reference_target,
        eagle3_target,
        dflash_target,
        lambda name: random_models("tiny", device=name),
    ],
    ids=["reference", "eagle3", "dflash", "random"],
)
def test_a_device_must_exist(create):
    with pytest.raises(ConfigError, match="unknown device 'cpuu'"):
        create("cpuu")
