"""Documentation and registration of every op, and the rules of arguments."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from typing import Annotated

import pytest
import torch

import graphkit.ops
from graphkit.errors import AttentionError, ConfigError, InputError
from graphkit.ops.argument_rules import ArgumentRules
from graphkit.ops.docstrings import complete_docstring
from graphkit.ops.kv_cache import store_kv
from graphkit.ops.registration import OPS
from graphkit.ops.target_probs import target_probs

MODULES = (
    "accepted_path", "decoder", "device_loop", "draft_length", "experts", "heads", "kv_cache",
    "latent_heads", "linear", "logits", "ngram", "paged_attention", "paged_metadata", "processors",
    "quantized_linear", "recurrent", "refresh",
    "rejection", "rows", "sampling", "step_rows", "step_state", "stored_tokens", "target_probs",
    "tree", "tree_growth", "verification",
)  # fmt: skip
PUBLIC = [getattr(graphkit.ops, name) for name in graphkit.ops.__all__]
INTERNAL = [
    getattr(module, name)
    for module in (importlib.import_module(f"graphkit.ops.{name}") for name in MODULES)
    for name in OPS
    if OPS[name].reference.__module__ == module.__name__ and name not in graphkit.ops.__all__
]
SHAPE_AND_DTYPE = re.compile(
    r"\[.*\] (of any dtype|of the dtype of \w+|bool|u?int\d+|float\d+|bfloat16|floating-point)"
)
LETTER = re.compile(r"\b[A-Za-z]\b")
"""The name of a dimension."""
every_op = pytest.mark.parametrize("op", PUBLIC + INTERNAL, ids=lambda op: op.__name__)


def test_every_registered_op_is_listed_here():
    assert {op.__name__ for op in PUBLIC + INTERNAL} == OPS.keys()


def argument_lines(op):
    """Return the type and the meaning of each argument in the docstring of an op."""
    section = re.search(r"\nArgs:\n(.*?)(\n\n|$)", inspect.getdoc(op), re.DOTALL)[1]
    entries = re.split(r"\n    (?=\w)", f"\n{section}")[1:]
    return {
        match[1]: (match[2], match[3])
        for match in (re.match(r"(\w+) \((.*?)\): (.*)", " ".join(x.split())) for x in entries)
    }


@every_op
def test_the_documentation_of_an_op_has_every_argument_with_its_shape_and_dtype(op):
    schema = getattr(torch.ops.graphkit, op.__name__).default._schema
    lines = argument_lines(op)
    assert list(lines) == list(inspect.signature(op).parameters)
    assert list(lines) == [argument.name for argument in schema.arguments]
    for argument in schema.arguments:
        kind, meaning = lines[argument.name]
        assert ("written in place" in kind) == argument.is_write
        if "Tensor" in str(argument.type):
            assert SHAPE_AND_DTYPE.search(f"{kind} {meaning}"), argument.name


@every_op
def test_the_documentation_of_an_op_explains_the_letters_of_shapes(op):
    doc = inspect.getdoc(op)
    kinds = (kind.split(" of the dtype of ")[0] for kind, _ in argument_lines(op).values())
    used = {letter for kind in kinds for letter in LETTER.findall(kind)}
    explained = re.search(r"\nDimensions: (.*?)\n\n", doc, re.DOTALL)
    assert used <= set(LETTER.findall(explained[1] if explained else "")), used


@every_op
def test_the_documentation_of_an_op_says_when_it_runs_and_what_it_raises(op):
    doc = " ".join(inspect.getdoc(op).split())
    assert "Never synchronises; may be captured" in doc
    if op.__name__ != "refresh":
        assert re.search(r" Raises: (Input|Attention)Error: A tensor has", doc)
    returns = getattr(torch.ops.graphkit, op.__name__).default._schema.returns
    assert bool(returns) == (" Returns: " in doc)


@every_op
def test_help_shows_the_documentation_of_an_op(op):
    assert inspect.isfunction(op)
    shown = pydoc.plain(pydoc.render_doc(op))
    assert f"\n{op.__name__}({next(iter(inspect.signature(op).parameters))}" in shown
    for line in inspect.getdoc(op).splitlines():
        assert line in shown


def test_types_and_rules_complete_the_written_docstring():
    def scale(x, width, table=None):
        """Scale rows.

        Two launches.

        Args:
            x: The rows,
                scaled.
            width: Of a row.
            table: Factors.

        Returns:
            Nothing.
        """

    hints = {
        "x": Annotated[torch.Tensor, "[B, W >= 1], contiguous"],
        "width": Annotated[int, "W >= 1"],
        "table": Annotated[torch.Tensor | None, "[B] int32 or int64"],
    }
    doc = complete_docstring(
        scale, hints, mutates_args=("x",), errors=(AttentionError, ConfigError), differentiable=True
    )
    use = "At most one launch on the current stream, unless stated otherwise above. Never"
    assert doc.splitlines() == [
        "Scale rows.",
        "",
        "Two launches.",
        "",
        f"{use} synchronises; may",
        "be captured and differentiated.",
        "",
        "Args:",
        "    x (Tensor, [B, W >= 1] of any dtype, contiguous, written in place): The rows, scaled.",
        "    width (int, W >= 1): Of a row.",
        "    table (Tensor | None, [B] int32 or int64): Factors.",
        "",
        "Returns:",
        "    Nothing.",
        "",
        "Raises:",
        "    AttentionError: A tensor has the wrong shape, dtype, device or layout.",
        "    ConfigError: A number is out of range.",
    ]  # fmt: skip


def test_an_op_must_describe_every_argument():
    def scale(x):
        """Scale rows.

        Args:
            y: The rows.
        """

    with pytest.raises(AssertionError, match=r"scale: Args are \['y'\]"):
        complete_docstring(
            scale, {"x": int}, mutates_args=(), errors=(InputError,) * 2, differentiable=False
        )


@pytest.mark.slow
def test_ops_load_without_their_kernels():
    modules = ", ".join(["graphkit.ops", *(f"graphkit.ops.{name}" for name in MODULES)])
    script = f"import sys, {modules}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "graphkit.ops.refresh" in loaded
    assert not [name for name in loaded if name.startswith("graphkit.ops.kernels")]


@every_op
def test_an_op_has_a_launcher(op):
    assert inspect.signature(OPS[op.__name__].launch).parameters


def test_arguments_may_be_named():
    accept_index = torch.tensor([[1, -1]], dtype=torch.int32)
    compacted = graphkit.ops.compact_accepted_to_front(
        torch.tensor([5, 6]), num_draft_tokens=2, accept_index=accept_index
    )
    assert compacted.tolist() == [6, 5]


def test_an_op_without_a_gradient_refuses_backward():
    logits, ones = torch.zeros(2, 4, requires_grad=True), torch.ones(2)
    top_k = torch.zeros(2, dtype=torch.int32)
    probs = target_probs(logits, torch.arange(2), ones, top_k, ones, 0 * ones, 1)
    with pytest.raises(InputError, match=r"target_probs has no gradient: call it under torch.no_"):
        probs.sum().backward()


def test_a_write_leaves_its_target_out_of_autograd():
    keys = torch.ones(2, 1, 4, requires_grad=True)
    pool = torch.zeros(3, 1, 4)
    store_kv(pool, pool.clone(), torch.tensor([1, 2]), keys, keys)
    assert pool[1:].eq(1).all()
    assert not pool.requires_grad


HINTS = {
    "first": Annotated[torch.Tensor, "[B, W >= 1] int64"],
    "flat": Annotated[torch.Tensor, "[B * W], contiguous"],
    "either": Annotated[torch.Tensor | None, "[B] or [B, K] int32 or int64"],
    "rows": Annotated[torch.Tensor, "[B + 1, ...] float32"],
    "unchecked": torch.Tensor,
    "steps": Annotated[int, "S >= 0"],
    "width": Annotated[int, "1 <= K <= max(1, S + 1)"],
    "p": Annotated[float, "0 <= p <= 1"],
}
VALID = {
    "first": torch.zeros(2, 3, dtype=torch.int64), "flat": torch.zeros(6, dtype=torch.bool),
    "either": torch.zeros(2, 4, dtype=torch.int32), "rows": torch.zeros(3, 5, 6),
    "unchecked": None, "steps": 3, "width": 4, "p": 0.5,
}  # fmt: skip


class TestRules:
    """The rules of arguments, without an op."""

    @pytest.mark.parametrize(
        "change",
        [
            {},
            {"either": None},
            {"either": torch.zeros(2, dtype=torch.int64)},
            {"rows": torch.zeros(3)},
            {"p": 0},
            {"steps": 0, "width": 1, "either": None},
        ],
    )
    def test_accept(self, change):
        ArgumentRules("op", HINTS).check(tuple((VALID | change).values()))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"first": torch.zeros(2, 3)},
             "first is [2, 3] float32 on cpu, expected [B, W >= 1] = [B, W] int64 on cpu."),
            ({"first": torch.zeros(2, 0).long(), "flat": torch.zeros(0)},
             "first is [2, 0] int64 on cpu, expected [B, W >= 1] = [2, 1] int64 on cpu."),
            ({"flat": torch.zeros(2, 3)},
             "flat is [2, 3] float32 on cpu, expected [B * W] on cpu."),
            ({"flat": torch.zeros(7)},
             "flat is [7] float32 on cpu, expected [B * W] = [6] on cpu."),
            ({"either": torch.zeros(2, 5).int()},
             "either is [2, 5] int32 on cpu, expected [B, K] = [2, 4] int32 or int64 on cpu."),
            ({"rows": torch.zeros(2, 5)},
             "rows is [2, 5] float32 on cpu, expected [B + 1, ...] = [3, ...] float32 on cpu."),
            ({"rows": torch.zeros(3, device="meta")},
             "rows is [3] float32 on meta, expected [B + 1, ...] = [3, ...] float32 on cpu."),
            ({"steps": -1}, "steps is -1, expected at least 0."),
            ({"width": 5}, "width is 5, expected 1 to 4 = max(1, S + 1)."),
            ({"p": float("nan")}, "p is nan, expected 0 to 1."),
        ],
    )  # fmt: skip
    def test_refuse(self, change, message):
        rules = ArgumentRules("op", HINTS)
        with pytest.raises(InputError) as caught:
            rules.check(tuple((VALID | change).values()))
        assert str(caught.value) == f"op: {message}"
        assert caught.value.field == next(iter(change))

    def test_errors_are_those_of_the_op(self):
        rules = ArgumentRules("op", HINTS, errors=(AttentionError, ConfigError))
        with pytest.raises(AttentionError, match="has strides"):
            rules.check(tuple((VALID | {"flat": torch.zeros(12)[::2]}).values()))
        with pytest.raises(ConfigError, match="steps"):
            rules.check(tuple((VALID | {"steps": -1}).values()))

    def test_sizes_may_come_from_a_later_argument(self):
        wrong = VALID | {"first": torch.zeros(3, 2).long()}
        rules = ArgumentRules("op", HINTS, sizes_from=("either",))
        with pytest.raises(InputError, match="first is"):
            rules.check(tuple(wrong.values()))

    @pytest.mark.parametrize("rule", ["[B", "[B] int64,contiguous", "W > 1"])
    def test_a_rule_that_cannot_be_read_is_refused(self, rule):
        with pytest.raises(AssertionError, match="no rule"):
            ArgumentRules("op", {"x": Annotated[torch.Tensor, rule]})
