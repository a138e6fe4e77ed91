"""What several rooms are tested with: a draft tree grown by hand, small models, an interpreter.

The tree grows with loops over one request: what the runners and ops must agree on. Its scores are
products of float32, as on a device, so that ties fall alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest


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


@pytest.fixture(scope="module")
def models():
    """A target, its Eagle head and its MTP layers, with weights of nothing in particular."""
    import torch

    from graphkit.reference import EagleHead, LlamaConfig, LlamaModel, MTPHead

    torch.manual_seed(3)
    facts = {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    model = LlamaModel(LlamaConfig(num_hidden_layers=2, **facts))
    eagle = EagleHead(LlamaConfig(num_hidden_layers=1, **facts), model)
    mtp = MTPHead(LlamaConfig(num_hidden_layers=3, **facts), model)
    return [module.requires_grad_(False) for module in (model, eagle, mtp)]


@pytest.fixture(scope="session")
def assert_interpreted_pass():
    """``assert_interpreted_pass(*files)``: the tests of the files pass in Triton's interpreter.

    TRITON_INTERPRET must be set before triton is imported, so another process runs them. It runs
    several files, since its start takes seconds.
    """

    def check(*files):
        command = [sys.executable, "-m", "pytest", *map(str, files), "-q", "-p", "no:cacheprovider"]
        env = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]

    return check


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    """Make Triton's interpreter faster. It repeats the same work for every operation of a kernel.

    It replaces the functions of ``triton.language`` at every call of a function within a kernel;
    once per launch is enough. It makes a table of all types to look one up. It checks integers for
    overflow, with seven more operations each; the shapes of tests are too small to overflow.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    patch_language, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, {}
    find_type, types = interpreter._get_np_dtype, {}

    def patch_once(function):
        module = function.__globals__["__name__"]
        if module not in patched:
            patched[module] = patch_language(function)
        return patched[module]

    def launch_and_forget(*args, **options):
        patched.clear()
        return launch(*args, **options)

    def known_type(of):
        name = of.scalar.name
        if name not in types:
            types[name] = find_type(of)
        return types[name]

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_and_forget)
        patch.setattr(interpreter, "_get_np_dtype", known_type)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
