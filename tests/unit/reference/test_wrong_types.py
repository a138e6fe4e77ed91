"""Arguments of wrong types, and devices that do not exist, raise errors of graphkit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from graphkit import CheckpointError, ConfigError
from graphkit.engine.attention import PagedAttention
from graphkit.models.heads.folders import (
    head_algorithm,
    load_dflash_head,
    load_eagle3_head,
    load_eagle_head,
    load_mtp_head,
    save_draft_head,
)
from graphkit.models.reference import (
    default_checkpoint,
    dflash_target,
    eagle3_target,
    reference_engine,
    reference_target,
)
from graphkit.models.sharded import (
    checkpoint_dtype,
    engine_of,
    load_checkpoint,
    load_models,
    model_target,
    random_models,
    save_checkpoint,
    shard_model,
    spec_of,
)

PLAIN = partial(reference_engine, "NONE", device="cpu")
TINY = partial(random_models, "tiny", device="cpu")


@pytest.mark.parametrize("algorithm", [3, None, ["EAGLE"], "EAGLE4"])
def test_an_algorithm_is_one_of_the_names(algorithm):
    for create in (reference_engine, load_models):
        with pytest.raises(ConfigError, match="has no reference drafter") as caught:
            create(algorithm, device="cpu")
        assert caught.value.field == "algorithm"
    with pytest.raises(ConfigError, match=r"unknown algorithm|must be a name") as caught:
        spec_of(algorithm)
    assert caught.value.field == "algorithm"


def test_the_name_of_an_algorithm_may_have_any_case():
    assert load_models("eagle", device="cpu").draft is not None


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


@pytest.mark.parametrize("folder", [3, None, ["weights"], b"weights"], ids=str)
@pytest.mark.parametrize(
    "read",
    [
        load_checkpoint,
        checkpoint_dtype,
        head_algorithm,
        lambda folder: load_eagle_head(folder, None),
        lambda folder: load_eagle3_head(folder, None),
        lambda folder: load_mtp_head(folder, None),
        lambda folder: load_dflash_head(folder, None),
        lambda folder: save_checkpoint(None, folder),
        lambda folder: save_draft_head(None, folder),
    ],
    ids=[
        "load_checkpoint", "checkpoint_dtype", "head_algorithm", "load_eagle_head",
        "load_eagle3_head", "load_mtp_head", "load_dflash_head", "save_checkpoint",
        "save_draft_head",
    ],
)  # fmt: skip
def test_a_folder_is_a_path(read, folder):
    with pytest.raises(ConfigError, match=r"\.folder must be the path of a folder, got") as caught:
        read(folder)
    assert caught.value.field == "folder"


@pytest.mark.parametrize(
    ("create", "field"),
    [
        (lambda: load_models("NONE", checkpoint=3, device="cpu"), "checkpoint"),
        (lambda: load_models("EAGLE", draft=3, device="cpu"), "draft"),
        (lambda: reference_target(checkpoint=["weights"]), "checkpoint"),
    ],
    ids=["checkpoint", "draft", "target"],
)
def test_the_folders_of_models_are_paths(create, field):
    with pytest.raises(ConfigError, match="must be the path of a folder, or None") as caught:
        create()
    assert caught.value.field == field


@pytest.mark.parametrize("kind", [3, None, ["eagle"], "", ".."])
def test_a_kind_of_weights_is_one_of_the_names(kind):
    with pytest.raises(CheckpointError, match=r"has no weights .*: kinds are dflash, eagle,"):
        default_checkpoint(kind)


@pytest.mark.parametrize("dtype", ["a", 3, None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "create",
    [
        PLAIN,
        TINY,
        partial(load_checkpoint, default_checkpoint()),
        partial(load_models, "NONE", device="cpu"),
    ],
    ids=["engine", "random", "checkpoint", "models"],
)
def test_a_dtype_is_one_that_models_compute_in(create, dtype):
    with pytest.raises(ConfigError, match=r"\.dtype must be torch.float16, bfloat16") as caught:
        create(dtype=dtype)
    assert caught.value.field == "dtype"


@pytest.mark.parametrize("device", ["cpuu", 3.5, None])
def test_a_device_of_weights_must_exist(device):
    with pytest.raises(ConfigError, match=r"must be a torch.device or a name") as caught:
        load_checkpoint(default_checkpoint(), device=device)
    assert caught.value.field == "device"


@pytest.mark.parametrize("attention", [3, "sdpa", len, int, object, PagedAttention])
@pytest.mark.parametrize("create", [PLAIN, reference_target], ids=["engine", "target"])
def test_an_attention_is_a_class_of_backends(create, attention):
    with pytest.raises(ConfigError, match="attention must be a class derived from") as caught:
        create(attention=attention)
    assert caught.value.field == "attention"


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
    [PLAIN, TINY, partial(load_checkpoint, default_checkpoint()), reference_target],
    ids=["engine", "random", "checkpoint", "target"],
)
def test_a_group_is_a_rank_group(create, group):
    with pytest.raises(ConfigError, match=r"group must be a graphkit.RankGroup") as caught:
        create(group=group)
    assert caught.value.field == "group"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda _models, folder: save_checkpoint(3, folder), "model"),
        (lambda _models, folder: save_draft_head(3, folder), "head"),
        (lambda models, _folder: shard_model(models.target, 3), "group"),
        (lambda _models, _folder: model_target(3, name="tiny"), "model"),
        (lambda models, _folder: model_target(models.target, 3, name="tiny"), "head"),
        (lambda models, _folder: model_target(models.target, None, 3, name="tiny"), "mtp"),
        (lambda _models, _folder: engine_of(3, spec_of("NONE")), "models"),
        (lambda models, _folder: engine_of(models, 3), "spec"),
    ],
    ids=[
        "save model", "save head", "shard", "target of a model", "target with a head",
        "target with layers", "engine of models", "engine with settings",
    ],
)  # fmt: skip
def test_models_are_those_of_the_reference(call, field, tmp_path):
    with pytest.raises(ConfigError) as caught:
        call(TINY(), tmp_path / "saved")
    assert caught.value.field == field
    assert not (tmp_path / "saved").exists()
