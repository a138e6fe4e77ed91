"""What several rooms are tested with: a draft tree grown by hand, an interpreter.

The tree grows with loops over one request: what the runners and ops must agree on. Its scores are
products of float32, as on a device, so that ties fall alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tensor_cores

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    """Run the tests that are marked ``interpreted`` in Triton's interpreter alone."""
    is_interpreter = os.environ.get("TRITON_INTERPRET") == "1"
    left_out = [
        item
        for item in items
        if item.path.is_relative_to(HERE)
        and item.path.name.startswith("test_")
        and bool(item.get_closest_marker("interpreted")) != is_interpreter
    ]
    config.hook.pytest_deselected(items=left_out)
    excluded = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in excluded]


@dataclass(eq=False)
class Candidate:
    """A drafted token.

    Attributes:
        number: Counted over all steps, those of step 0 first.
        parent: The branch that it continues; ``None`` is the root.
        place: Which branch of its step it is, once it was kept.
    """

    number: int
    token: int
    score: np.float32
    parent: Candidate | None = None
    place: int = -1

    @property
    def path(self):
        """From step 0 down to itself."""
        return [*(self.parent.path if self.parent else []), self]


class HandTree:
    """Grows by ``propose(branch)``, which gives (probability, token) of its K continuations."""

    def __init__(self, first, propose, *, num_steps):
        self.topk, self.num_steps = len(first), num_steps
        self.candidates, self.branches = [], []
        made = [Candidate(k, token, np.float32(p)) for k, (p, token) in enumerate(first)]
        self._keep(made, made)
        for _ in range(1, num_steps):
            number, made = len(self.candidates), []
            for branch in self.branches[-1]:
                for p, token in propose(branch):
                    score = branch.score * np.float32(p)
                    made.append(Candidate(number + len(made), token, score, branch))
            self._keep(made, ranked(made)[: self.topk])

    def _keep(self, made, branches):
        self.candidates += made
        self.branches.append(branches)
        for place, branch in enumerate(branches):
            branch.place = place

    def chosen(self, width):
        """The width - 1 best, in the order of their numbers."""
        return sorted(ranked(self.candidates)[: width - 1], key=lambda each: each.number)

    def output(self, width):
        """As ``DraftOutput`` has it for this request."""
        parents = [branch.number for step in self.branches[:-1] for branch in step]
        chosen = self.chosen(width)
        return {
            "parent_list": [-1, *parents],
            "top_scores_index": [each.number for each in chosen],
            "draft_tokens": [each.token for each in chosen],
        }

    def sees(self, width):
        """Nodes that each node sees: itself and its ancestors, the root is 0."""
        chosen = self.chosen(width)
        return [{0}, *({0, *(chosen.index(node) + 1 for node in each.path)} for each in chosen)]


def ranked(candidates):
    """The best first, the smaller number among equals."""
    return sorted(candidates, key=lambda each: (-each.score, each.number))


@pytest.fixture(scope="session")
def grow_by_hand():
    """``grow_by_hand(first, propose, num_steps=)``: the class :class:`HandTree`."""
    return HandTree


@pytest.fixture(scope="session")
def assert_interpreted_pass():
    """``assert_interpreted_pass(*files)``: the tests of the files pass in Triton's interpreter.

    TRITON_INTERPRET must be set before triton is imported, so another process runs them. It runs
    several files, since its start takes seconds.
    """

    def check(*files):
        command = [sys.executable, "-m", "pytest", *map(str, files), "-q", "-p", "no:cacheprovider"]
        env = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]

    return check


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    """Make Triton's interpreter faster. It repeats the same work for every operation of a kernel.

    It replaces the functions of ``triton.language`` at every launch and at every call of a function
    within a kernel; once per process is enough. It makes a table of all types to look one up. It
    wraps the sizes of every value anew; there are few shapes. It calls each builtin through two
    functions that check and copy its keywords. It checks integers for overflow, with seven more
    operations each; the shapes of tests are too small to overflow.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    find_type, types = interpreter._get_np_dtype, {}
    make_tensor, tensors = core.tensor.__init__, {}
    make_block, blocks = core.block_type.__init__, {}

    def known_type(of):
        name = of.scalar.name
        if name not in types:
            types[name] = find_type(of)
        return types[name]

    def known_tensor(self, handle, of):
        shape = tuple(of.shape) if of.is_block() else ()
        if shape not in tensors:
            make_tensor(self, handle, of)
            tensors[shape] = {"shape": self.shape, "numel": self.numel}
        self.__dict__ = {"handle": handle, "type": of, "dtype": of.scalar, **tensors[shape]}

    def known_block(self, element_ty, shape):
        key = element_ty.name, tuple(getattr(each, "value", each) for each in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key] | {"element_ty": element_ty}

    def patch_builtin(owner, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", known_type)
        patch.setattr(core.tensor, "__init__", known_tensor)
        patch.setattr(core.block_type, "__init__", known_block)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        patch.setattr(interpreter, "_patch_attr", patch_builtin)
        importing_both = SimpleNamespace(__globals__={"tl": language, "core": core})
        patched = interpreter._patch_lang(importing_both)
        patch.setattr(interpreter, "_patch_lang", lambda _: SimpleNamespace(restore=lambda: None))
        yield
        patched.restore()


@pytest.fixture
def products_in_order(monkeypatch):
    """Let Triton's interpreter add the products of a ``tl.dot`` in order, as tensor cores do.

    The order of BLAS depends on the sizes and the addresses of both matrices. A ``tl.fma`` of the
    interpreter has two roundings.
    """
    from triton.runtime import interpreter

    def dot(self, a, b, total, *_):
        values = (torch.from_numpy(np.ascontiguousarray(each.data)) for each in (a, b, total))
        result = tensor_cores.multiply(*values).numpy().astype(total.data.dtype)
        return interpreter.TensorHandle(result, total.dtype.scalar)

    def fma(self, value, other, summand):
        values = (torch.from_numpy(np.array(each.data)) for each in (value, other, summand))
        return interpreter.TensorHandle(tensor_cores.fma(*values).numpy(), summand.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
