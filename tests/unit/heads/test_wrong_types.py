"""Arguments of wrong types, and devices that do not exist, raise errors of graphkit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from graphkit import CheckpointError, ConfigError
from graphkit.engine.attention import PagedAttention
from graphkit.models import random_model
from graphkit.models.reference import (
    default_checkpoint,
    dflash_target,
    eagle3_target,
    reference_engine,
    reference_model,
    reference_target,
)

PLAIN = partial(reference_engine, "NONE", device="cpu")
TINY = partial(random_model, "tiny", device="cpu")


@pytest.mark.parametrize("algorithm", [3, None, ["EAGLE"], "EAGLE4"])
def test_an_algorithm_is_one_of_the_names(algorithm):
    for create in (reference_engine, reference_model):
        with pytest.raises(
            ConfigError, match=r"draft model of its kind|algorithm must be"
        ) as caught:
            create(algorithm, device="cpu")
        assert caught.value.field == "algorithm"


def test_the_name_of_an_algorithm_may_have_any_case():
    assert reference_model("eagle", device="cpu").draft is not None


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
        lambda name: random_model("tiny", device=name),
    ],
    ids=["reference", "eagle3", "dflash", "random"],
)
def test_a_device_must_exist(create):
    with pytest.raises(ConfigError, match="unknown device 'cpuu'"):
        create("cpuu")


@pytest.mark.parametrize("kind", [3, None, ["eagle"], "", ".."])
def test_a_kind_of_weights_is_one_of_the_names(kind):
    with pytest.raises(CheckpointError, match=r"has no weights .*: kinds are dflash, eagle,"):
        default_checkpoint(kind)


@pytest.mark.parametrize("dtype", ["a", 3, None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "create",
    [TINY],
    ids=["random"],
)
def test_a_dtype_is_one_that_models_compute_in(create, dtype):
    with pytest.raises(ConfigError, match=r"\.dtype must be torch.float16, bfloat16") as caught:
        create(dtype=dtype)
    assert caught.value.field == "dtype"


@pytest.mark.slow
@pytest.mark.parametrize("attention", [3, "sdpa", len, int, object, PagedAttention])
@pytest.mark.parametrize("create", [PLAIN, reference_target], ids=["engine", "target"])
def test_an_attention_is_a_class_of_backends(create, attention):
    with pytest.raises(ConfigError, match="attention must be a class derived from") as caught:
        create(attention=attention)
    assert caught.value.field == "attention"


@pytest.mark.slow
@pytest.mark.parametrize("size", [3.5, "8", 0, -1, True])
@pytest.mark.parametrize(
    "create",
    [PLAIN, reference_target, eagle3_target, dflash_target],
    ids=["engine", "reference", "eagle3", "dflash"],
)
def test_a_batch_size_is_a_positive_int(create, size):
    with pytest.raises(ConfigError, match="max_batch_size must be an int >= 1, got") as caught:
        create(max_batch_size=size)
    assert caught.value.field == "max_batch_size"


@pytest.mark.parametrize("seed", ["a", None, 1.5, True, 2**64, -(2**63) - 1])
def test_a_seed_is_an_int_that_torch_takes(seed):
    with pytest.raises(ConfigError, match=r"seed must be an int from -2\*\*63") as caught:
        TINY(seed=seed)
    assert caught.value.field == "seed"


@pytest.mark.parametrize("group", [3, "ranks"])
@pytest.mark.parametrize(
    "create",
    [PLAIN, TINY, reference_target],
    ids=["engine", "random", "target"],
)
def test_a_group_is_a_rank_group(create, group):
    with pytest.raises(ConfigError, match=r"group must be a graphkit.RankGroup") as caught:
        create(group=group)
    assert caught.value.field == "group"


def test_an_unknown_option_of_an_engine_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        PLAIN(steps=4)
