"""A module is called by its place in a model, a weight's name, its parent, or its class."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from graphkit.graphs.module_names import ModuleNames


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.act = nn.Linear(2, 2), nn.ReLU()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(3, 2), nn.ModuleList([Block(), Block()])


@pytest.fixture
def model():
    return Model()


def run(names, *modules):
    """The paths of modules that run one inside the other."""
    paths = [names.enter(module) for module in modules]
    assert all(names.leave(module) for module in reversed(modules))
    return paths


def test_a_declared_model_names_all_below_it(model):
    block = model.layers[1]
    assert run(ModuleNames(model), model, model.embed) == ["Model", "embed"]
    assert run(ModuleNames(model), block.proj) == ["layers.1.proj"]
    assert run(ModuleNames(model), block, block.act) == ["layers.1", "layers.1.act"]


@pytest.mark.parametrize("prefix", ["", "target.", "a.b."])
def test_a_weights_name_tells_the_place_of_its_module(model, prefix):
    weights = {f"{prefix}{name}": weight for name, weight in model.named_parameters()}
    block = model.layers[1]
    assert run(ModuleNames(weights), block.proj) == [f"{prefix}layers.1.proj"]
    assert run(ModuleNames(weights), block, block.act) == [
        f"{prefix}layers.1", f"{prefix}layers.1.act",
    ]  # fmt: skip


@pytest.mark.parametrize(("prefix", "path"), [("", "Model"), ("target.", "target")])
def test_the_model_itself_is_found_by_its_weights(model, prefix, path):
    weights = {f"{prefix}{name}": weight for name, weight in model.named_parameters()}
    assert run(ModuleNames(weights), model, model.layers[0].proj) == [
        path, f"{prefix}layers.0.proj",
    ]  # fmt: skip


def test_a_weight_under_another_name_says_nothing(model):
    weights = {"w": model.embed.weight, "proj_weight": model.layers[0].proj.weight}
    assert run(ModuleNames(weights), model.embed) == ["Embedding"]
    assert run(ModuleNames(weights), model.layers[0].proj) == ["Linear"]


def test_weights_without_memory_of_their_own_are_not_taken_for_each_other():
    with torch.device("meta"):
        declared, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert run(ModuleNames({"lm_head.weight": declared.weight}), other) == ["Linear"]


def test_a_module_that_came_later_is_named_by_its_parent(model):
    names = ModuleNames(model)
    model.layers[0].late = nn.Sequential(nn.Tanh())
    late = model.layers[0].late
    assert run(names, model.layers[0], late, late[0]) == [
        "layers.0", "layers.0.late", "layers.0.late.0",
    ]  # fmt: skip


def test_the_nearest_module_that_runs_is_the_parent(model):
    names, block, late = ModuleNames(model), Block(), nn.Tanh()
    names.enter(model)
    names.enter(block)
    model.late = block.late = late
    assert names.enter(late) == "Block.late"


def test_a_strange_module_is_called_by_its_class(model):
    assert run(ModuleNames(model), nn.Tanh()) == ["Tanh"]
    block = Block()
    assert run(ModuleNames(None), block, block.proj) == ["Block", "Block.proj"]


def test_a_module_that_is_gone_leaves_its_name_to_nobody():
    """Some are made in a forward and die with it; the next one may have their id."""
    names = ModuleNames(None)
    for _ in range(20):
        assert run(names, nn.Softmax(dim=-1)) == ["Softmax"]
        assert run(names, nn.Tanh()) == ["Tanh"]


def test_a_module_that_was_not_seen_to_begin_ends_nothing(model):
    names = ModuleNames(model)
    names.enter(model)
    assert not names.leave(model.embed)
    assert names.leave(model)
    assert not names.leave(model)


def test_names_keep_no_module():
    names, module = ModuleNames(None), nn.Tanh()
    run(names, module)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_a_name_holds_from_its_first_use(model):
    names = ModuleNames(None)
    assert run(names, model, model.embed) == ["Model", "Model.embed"]
    assert run(names, model.embed) == ["Model.embed"]


class Towers(nn.Module):
    """Two towers over the same block; ``shared`` is one more name of it."""

    def __init__(self):
        super().__init__()
        block = Block()
        self.left, self.right = nn.Sequential(block), nn.Sequential(block)
        self.shared = block


def test_a_shared_module_is_called_by_the_one_around_it():
    model = Towers()
    names, block = ModuleNames(model), model.shared
    assert run(names, model, model.left, block, block.act)[2:] == ["left.0", "left.0.act"]
    assert run(names, model, model.right, block, block.act)[2:] == ["right.0", "right.0.act"]
    assert run(names, model, block) == ["Towers", "left.0"], "else by its first name"


def test_a_model_that_nobody_declared_shares_modules_as_well():
    model = Towers()
    paths = run(ModuleNames(None), model, model.right, model.shared)
    assert paths == ["Towers", "Towers.right", "Towers.right.0"]


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_compiled_module_is_called_as_if_it_were_not(model, when):
    """Whether it was compiled before its model was declared, after it, or the model was not."""
    block = model.layers[1]
    names = ModuleNames(model if when == "after" else None)
    model.layers[1] = compiled = torch.compile(block)
    names = ModuleNames(model) if when == "before" else names
    prefix = "Model." if when == "never" else ""
    paths = run(names, model, compiled, block, block.act)
    assert paths == ["Model", *[f"{prefix}layers.1"] * 2, f"{prefix}layers.1.act"]


def test_a_compiled_model_is_called_as_the_model_itself(model):
    compiled = torch.compile(model)
    for declared in (model, compiled):
        paths = run(ModuleNames(declared), compiled, model, model.layers[1])
        assert paths == ["Model", "Model", "layers.1"]
    assert run(ModuleNames(None), compiled, model.embed) == ["Model", "Model.embed"]


def test_a_compiled_module_that_came_later_is_named_by_its_parent(model):
    names = ModuleNames(model)
    model.late = torch.compile(Block())
    assert run(names, model, model.late)[1:] == ["Model.late"]
