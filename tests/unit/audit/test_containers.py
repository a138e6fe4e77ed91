"""What the walk over a forward's objects takes from torch and Python, apart from our own use of it.

A failure here after an update says that torch or Python keeps these values elsewhere.
"""

from __future__ import annotations

import torch
from torch import nn

from graphkit.audit.host_objects.containers import MODULE_DICTS, containers
from graphkit.audit.host_objects.reachable_objects import code_words


class Both(nn.Module):
    """A module with a parameter, a buffer, a child and a number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.zeros(2))
        self.child = nn.Linear(2, 2)
        self.scale = 2.0


def test_a_module_keeps_its_tensors_and_children_in_three_dicts():
    module = Both()
    kept = {name: list(vars(module)[name]) for name in MODULE_DICTS}
    assert kept == {"_parameters": ["weight"], "_buffers": ["table"], "_modules": ["child"]}
    module._parameters["weight"] = other = nn.Parameter(torch.zeros(2))
    assert module.weight is other, "the dicts are the storage, not copies"


def test_the_containers_of_a_module_are_its_attributes_and_these_dicts():
    names = [set(container.read()) for container in containers("both", Both())]
    assert names == [{"scale"}, {"weight"}, {"table"}, {"child"}]


def test_a_closure_can_be_read_and_set():
    scale = 2.0

    def forward(rows):
        return rows * scale

    cells = next(containers("forward", forward))
    assert cells.read() == {"scale": 2.0}
    cells.set("scale", 3.0)
    assert scale == 3.0


def test_code_contains_the_words_that_it_reads_by():
    def outer(model, rows):
        first = [row * model.in_comprehension for row in rows]
        second = (lambda: model.in_a_string)()
        return first, second, f"{model.in_a_text!r}", torch.relu

    expected = {"in_comprehension", "in_a_string", "in_a_text", "relu", "torch"}
    assert expected <= code_words(outer.__code__)
