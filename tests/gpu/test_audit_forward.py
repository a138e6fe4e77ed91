"""The audit of forwards on CUDA: kernels that no operation launched, and compiled functions."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import graphkit as gk
from graphkit.audit import audit_target
from tiny_target import TinyLayers, target_of

pytestmark = pytest.mark.gpu
HIDDEN = 64


@triton.jit
def increment(positions, out, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    rows = tl.load(positions + index, index < count) + 1
    tl.store(positions + index, rows, index < count)
    tl.store(out + index, rows, index < count)


@triton.jit
def read(positions, out, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(positions + index, index < count), index < count)


class Launching(TinyLayers):
    """Reads its positions with one kernel, and increments them with another one."""

    def __init__(self):
        super().__init__(HIDDEN, "cuda")

    def forward(self, inputs):
        count, before = inputs.num_tokens, torch.empty_like(inputs.positions)
        after = torch.empty_like(inputs.positions)
        read[(1,)](inputs.positions, before, count, BLOCK=64)
        increment[(1,)](inputs.positions, after, count, BLOCK=64)
        read[(1,)](inputs.positions, before, count, BLOCK=64)
        hidden = self.embedding(inputs.input_ids) + (before + after)[:, None]
        return gk.ForwardOutput(next_token_logits=self.head(hidden), hidden_states=hidden)


def test_a_kernel_that_writes_an_input_is_named_among_kernels_that_read_it():
    (finding,) = audit_target(target_of(Launching()), only=["forward"], device="cuda").findings
    assert (finding.kind, finding.field, finding.row) == ("written input", "positions", 0)
    assert (finding.before, finding.after) == ("0", "1")
    assert finding.kernel == "increment"


class Compiled(TinyLayers):
    """Increments its positions and drops numbers in a compiled function."""

    def __init__(self):
        super().__init__(HIDDEN, "cuda")
        self.body = torch.compile(self.write_and_drop)

    def write_and_drop(self, inputs_positions, hidden):
        inputs_positions.add_(1)
        return torch.nn.functional.dropout(hidden, 0.5, training=True)

    def forward(self, inputs):
        hidden = self.body(inputs.positions, self.embedding(inputs.input_ids))
        return gk.ForwardOutput(next_token_logits=self.head(hidden), hidden_states=hidden)


def test_compiled_functions_are_named_by_line():
    findings = audit_target(target_of(Compiled()), only=["forward"], device="cuda").findings
    assert [each.kind for each in findings] == ["written input", "random draw"]
    assert all(each.source.endswith("in write_and_drop") for each in findings)
