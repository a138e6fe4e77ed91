"""Paths of modules: from the declared model, a weight's name, the parent, or the class."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from graphkit.graphs.source_lines import ModuleNames


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
    """Paths of modules that run one inside the other."""
    paths = [names.enter(module) for module in modules]
    assert all(names.leave(module) for module in reversed(modules))
    return paths


def test_a_declared_model_names_all_its_modules(model):
    block = model.layers[1]
    assert run(ModuleNames(model), model, model.embed) == ["Model", "embed"]
    assert run(ModuleNames(model), block.proj) == ["layers.1.proj"]
    assert run(ModuleNames(model), block, block.act) == ["layers.1", "layers.1.act"]


@pytest.mark.parametrize("prefix", ["", "target.", "a.b."])
def test_the_name_of_a_weight_gives_the_path_of_its_module(model, prefix):
    weights = {f"{prefix}{name}": weight for name, weight in model.named_parameters()}
    block = model.layers[1]
    assert run(ModuleNames(weights), block.proj) == [f"{prefix}layers.1.proj"]
    assert run(ModuleNames(weights), block, block.act) == [
        f"{prefix}layers.1", f"{prefix}layers.1.act",
    ]  # fmt: skip


@pytest.mark.parametrize(("prefix", "path"), [("", "Model"), ("target.", "target")])
def test_the_name_of_a_weight_gives_the_path_of_the_model(model, prefix, path):
    weights = {f"{prefix}{name}": weight for name, weight in model.named_parameters()}
    assert run(ModuleNames(weights), model, model.layers[0].proj) == [
        path, f"{prefix}layers.0.proj",
    ]  # fmt: skip


def test_an_unrelated_weight_name_gives_no_path(model):
    weights = {"w": model.embed.weight, "proj_weight": model.layers[0].proj.weight}
    assert run(ModuleNames(weights), model.embed) == ["Embedding"]
    assert run(ModuleNames(weights), model.layers[0].proj) == ["Linear"]


def test_weights_without_memory_give_no_path():
    with torch.device("meta"):
        declared, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert run(ModuleNames({"lm_head.weight": declared.weight}), other) == ["Linear"]


def test_a_module_added_later_is_named_below_its_parent(model):
    names = ModuleNames(model)
    model.layers[0].late = nn.Sequential(nn.Tanh())
    late = model.layers[0].late
    assert run(names, model.layers[0], late, late[0]) == [
        "layers.0", "layers.0.late", "layers.0.late.0",
    ]  # fmt: skip


def test_the_innermost_running_module_is_the_parent(model):
    names, block, late = ModuleNames(model), Block(), nn.Tanh()
    names.enter(model)
    names.enter(block)
    model.late = block.late = late
    assert names.enter(late) == "Block.late"


def test_an_unknown_module_is_named_by_its_class(model):
    assert run(ModuleNames(model), nn.Tanh()) == ["Tanh"]
    block = Block()
    assert run(ModuleNames(None), block, block.proj) == ["Block", "Block.proj"]


def test_the_name_of_a_freed_module_is_not_reused():
    """A module made in a forward is freed with it, and the next one may have its id."""
    names = ModuleNames(None)
    for _ in range(20):
        assert run(names, nn.Softmax(dim=-1)) == ["Softmax"]
        assert run(names, nn.Tanh()) == ["Tanh"]


def test_leaving_a_module_that_was_not_entered_returns_false(model):
    names = ModuleNames(model)
    names.enter(model)
    assert not names.leave(model.embed)
    assert names.leave(model)
    assert not names.leave(model)


def test_module_names_hold_no_reference():
    names, module = ModuleNames(None), nn.Tanh()
    run(names, module)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_a_name_stays_after_its_first_use(model):
    names = ModuleNames(None)
    assert run(names, model, model.embed) == ["Model", "Model.embed"]
    assert run(names, model.embed) == ["Model.embed"]


class Towers(nn.Module):
    """Two towers that share a block, which also has the name ``shared``."""

    def __init__(self):
        super().__init__()
        block = Block()
        self.left, self.right = nn.Sequential(block), nn.Sequential(block)
        self.shared = block


def test_a_shared_module_is_named_below_the_running_one():
    model = Towers()
    names, block = ModuleNames(model), model.shared
    assert run(names, model, model.left, block, block.act)[2:] == ["left.0", "left.0.act"]
    assert run(names, model, model.right, block, block.act)[2:] == ["right.0", "right.0.act"]
    assert run(names, model, block) == ["Towers", "left.0"], "otherwise by its first path"


def test_a_shared_module_of_an_undeclared_model_is_named_below_the_running_one():
    model = Towers()
    paths = run(ModuleNames(None), model, model.right, model.shared)
    assert paths == ["Towers", "Towers.right", "Towers.right.0"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_compiled_module_has_the_path_of_the_original(model, when):
    """Compiled before or after the model was declared, or in an undeclared model."""
    block = model.layers[1]
    names = ModuleNames(model if when == "after" else None)
    model.layers[1] = compiled = torch.compile(block)
    names = ModuleNames(model) if when == "before" else names
    prefix = "Model." if when == "never" else ""
    paths = run(names, model, compiled, block, block.act)
    assert paths == ["Model", *[f"{prefix}layers.1"] * 2, f"{prefix}layers.1.act"]


def test_a_compiled_model_has_the_paths_of_the_original(model):
    compiled = torch.compile(model)
    for declared in (model, compiled):
        paths = run(ModuleNames(declared), compiled, model, model.layers[1])
        assert paths == ["Model", "Model", "layers.1"]
    assert run(ModuleNames(None), compiled, model.embed) == ["Model", "Model.embed"]


def test_a_compiled_module_added_later_is_named_below_its_parent(model):
    names = ModuleNames(model)
    model.late = torch.compile(Block())
    assert run(names, model, model.late)[1:] == ["Model.late"]
