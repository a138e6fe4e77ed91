"""The source of kernels that start early follows the rules of ``graphkit.ops.kernels.launch``.

``test_compile.py`` checks the code that Triton makes of them.
"""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import indent

import pytest

import graphkit.ops

KERNELS = sorted((Path(graphkit.ops.__file__).parent / "kernels").glob("*.py"))
PREFETCHES = {
    "linear_kernel", "push_all_reduce_kernel", "streamed_linear_kernel", "streamed_plain_kernel",
    "streamed_warpgroup_kernel",
}  # fmt: skip
"""Kernels that request or read weights before they wait."""
BARRIERS = ["gdc_launch_dependents", "gdc_wait"]
WAIT = "wait_for_kernel_before(STARTS_EARLY)"
ORDERED_WAIT = "wait_then_start_next(STARTS_EARLY)"
WAIT_CALLS = "gdc_wait", "wait_for_kernel_before", "wait_then_start_next", "offset_after_wait"
STORES = {"rotated_heads_kernel", "store_kv_kernel"}
"""Kernels that let the next one start after they wait."""
ATTENTION = "paged_attention_kernel"
"""A kernel that waits later if it follows a store."""
EXPERTS = "expert_linear_kernel"
"""A kernel that waits later if it follows itself."""
HARMLESS = {"program_id", "num_programs", "arange", "full", "zeros", "to", "BlockedLayout"}
"""Calls that neither read nor write memory. Any other call may, such as one of a helper."""


def called(tree):
    """Return the last name of each call, in the order of the source."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [ast.unparse(call.func).rpartition(".")[2] for call in calls]


def is_wait(statement):
    is_block = isinstance(statement, ast.If) and ast.unparse(statement.test) == "STARTS_EARLY"
    starts_the_next = is_block and called(statement) == BARRIERS[:1]
    return (is_block and not starts_the_next) or ast.unparse(statement) in (WAIT, ORDERED_WAIT)


def broken_rule(kernel):
    """Return the rule that a kernel breaks, or an empty string."""
    starts_early = "STARTS_EARLY" in [parameter.arg for parameter in kernel.args.args]
    calls = called(kernel)
    if not starts_early:
        return "has no parameter STARTS_EARLY" if {*BARRIERS} & {*calls} else ""
    if kernel.name == ATTENTION:
        return broken_rule_of_attention(kernel, calls)
    if kernel.name == EXPERTS:
        return broken_rule_of_experts(kernel)
    waits = [index for index, each in enumerate(kernel.body) if is_wait(each)]
    if len(waits) != 1 or sum(map(calls.count, WAIT_CALLS)) != 1:
        return "does not wait once in all programs"
    before, wait = kernel.body[: waits[0]], kernel.body[waits[0]]
    is_block = isinstance(wait, ast.If)
    in_block = called(wait) if is_block else BARRIERS
    is_ordered = in_block == BARRIERS[::-1]  # the block of ``wait_then_start_next``
    ends_with_wait = not is_block or ast.unparse(wait.body[-1]).rpartition(".")[2] == "gdc_wait()"
    if not (is_ordered or ends_with_wait):
        return "does not wait at the end of the block"
    if any(isinstance(node, ast.Return) for each in before for node in ast.walk(each)):
        return "may return before the wait"
    if kernel.name not in PREFETCHES and any({*called(each)} - HARMLESS for each in before):
        return "may read or write before the wait"
    if kernel.name not in PREFETCHES and not (is_ordered or in_block in (BARRIERS, BARRIERS[1:])):
        return "may read or write before the wait"
    if kernel.name in STORES and ast.unparse(wait) != ORDERED_WAIT:
        return "lets the next kernel start before it waits"
    return ""


def broken_rule_of_attention(kernel, calls):
    """Return the rule that a kernel breaks which reads before it waits if it follows a store."""
    first = next(each for each in kernel.body if isinstance(each, ast.If))
    test = "STARTS_EARLY and (not FOLLOWS_STORE)"
    if ast.unparse(first.test) != test or called(first) != BARRIERS[1:]:
        return "does not wait first without a store"
    barriers = [each for each in calls if each in (*BARRIERS, "store")]
    if barriers[barriers.index(BARRIERS[0]) - 1] != "gdc_wait":
        return "lets the next kernel start before it waits"
    last = [each for each in kernel.body if is_wait(each)]
    before = kernel.body[: kernel.body.index(last[-1])] if last else kernel.body
    if any("store" in called(each) for each in before):
        return "may write before the wait"
    return ""


def broken_rule_of_experts(kernel):
    """Return the rule that a kernel breaks which reads before it waits if it follows itself."""
    waits = [each for each in kernel.body if is_block_of(each, BARRIERS[::-1])]
    tests = [ast.unparse(each.test) for each in waits]
    if tests != ["STARTS_EARLY and (not FOLLOWS)", "STARTS_EARLY and FOLLOWS"]:
        return "does not wait once in all programs"
    if sum(map(called(kernel).count, WAIT_CALLS)) != len(waits):
        return "does not wait once in all programs"
    first, last = map(kernel.body.index, waits)
    before = kernel.body[first:last]
    if any(isinstance(node, ast.Return) for each in before for node in ast.walk(each)):
        return "may return before the wait"
    if any({*called(each)} - HARMLESS for each in kernel.body[:first]):
        return "may read or write before the wait"
    reads = {"load", "_choices", "_outputs", "_search", "minimum", "where", "prefetch"}
    if any({*called(each)} - HARMLESS - reads - {*BARRIERS} for each in before):
        return "may write before the wait"
    return ""


def is_block_of(statement, calls):
    return isinstance(statement, ast.If) and called(statement) == calls


def functions(source):
    return [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)]


@pytest.mark.parametrize("path", KERNELS, ids=[path.stem for path in KERNELS])
def test_kernels_that_start_early_wait_first(path):
    broken = {each.name: broken_rule(each) for each in functions(path.read_text())}
    assert {name: rule for name, rule in broken.items() if rule} == {}


WAITS = "if STARTS_EARLY:\n  gdc_launch_dependents()\n  gdc_wait()"


@pytest.mark.parametrize(
    ("rule", "body"),
    [
        ("", f"row = program_id(0)\n{WAITS}\nload(x + row)"),
        ("", "if STARTS_EARLY:\n  gdc_wait()\nload(x)"),
        ("", f"{WAIT}\nload(x)"),
        (
            "",
            "if STARTS_EARLY:\n  gdc_wait()\nload(x)\nif STARTS_EARLY:\n  gdc_launch_dependents()",
        ),
        ("may read or write before the wait", f"load(x)\n{WAIT}"),
        ("does not wait once in all programs", "if STARTS_EARLY:\n  gdc_launch_dependents()"),
        ("does not wait once in all programs", "if row:\n" + indent(WAITS, "  ")),
        ("does not wait once in all programs", "load(x)"),
        ("does not wait at the end of the block", "if STARTS_EARLY:\n  gdc_wait()\n  load(x)"),
        ("does not wait at the end of the block", "if STARTS_EARLY:\n  if x:\n    gdc_wait()"),
        ("may return before the wait", f"if x:\n  return\n{WAITS}"),
        ("may read or write before the wait", f"load(x)\n{WAITS}"),
        ("may read or write before the wait", f"helper(x)\n{WAITS}"),
        ("may read or write before the wait", "if STARTS_EARLY:\n  load(x)\n  gdc_wait()"),
    ],
)
def test_a_broken_rule_is_found(rule, body):
    (kernel,) = functions("def kernel(x, STARTS_EARLY):\n" + indent(body, "  "))
    assert broken_rule(kernel) == rule


def test_a_store_lets_the_next_kernel_start_after_it_waits():
    source = "def store_kv_kernel(x, STARTS_EARLY):\n  {}\n  load(x)"
    (wrong,), (right,) = (functions(source.format(each)) for each in (WAIT, ORDERED_WAIT))
    assert broken_rule(wrong) == "lets the next kernel start before it waits"
    assert not broken_rule(right)


ATTENTION_SOURCE = """def paged_attention_kernel(x, STARTS_EARLY, FOLLOWS_STORE):
    {first}
    load(x)
    for start in range(4):
        if STARTS_EARLY:
            {inner}
            gdc_launch_dependents()
    {last}
    store(x)
"""
FIRST, INNER = "if STARTS_EARLY and not FOLLOWS_STORE: gdc_wait()", "gdc_wait()"
LAST = "if STARTS_EARLY: gdc_wait()"


@pytest.mark.parametrize(
    ("rule", "first", "inner", "last"),
    [
        ("", FIRST, INNER, LAST),
        ("does not wait first without a store", "if FOLLOWS_STORE: gdc_wait()", INNER, LAST),
        ("lets the next kernel start before it waits", FIRST, "store(x)", LAST),
        ("may write before the wait", FIRST, INNER, "pass"),
        ("may write before the wait", FIRST, INNER, "store(x)\n    " + LAST),
    ],
)
def test_a_broken_rule_of_attention_is_found(rule, first, inner, last):
    (kernel,) = functions(ATTENTION_SOURCE.format(first=first, inner=inner, last=last))
    assert broken_rule(kernel) == rule


EXPERTS_SOURCE = """def expert_linear_kernel(x, STARTS_EARLY, FOLLOWS):
    if STARTS_EARLY and not FOLLOWS:
        {order}
    {read}
    if STARTS_EARLY and FOLLOWS:
        {order}
    store(x)
"""
ORDER = "gdc_wait(); gdc_launch_dependents()"


@pytest.mark.parametrize(
    ("rule", "read", "order"),
    [
        ("", "load(x)", ORDER),
        ("may write before the wait", "store(x)", ORDER),
        ("may write before the wait", "_write_tile(x)", ORDER),
        ("may return before the wait", "if x: return", ORDER),
        ("does not wait once in all programs", "load(x)", "gdc_launch_dependents(); gdc_wait()"),
        ("does not wait once in all programs", "gdc_wait()", ORDER),
    ],
)
def test_a_broken_rule_of_experts_is_found(rule, read, order):
    (kernel,) = functions(EXPERTS_SOURCE.format(read=read, order=order))
    assert broken_rule(kernel) == rule


def test_a_kernel_without_the_parameter_does_not_wait():
    (kernel,) = functions("def kernel(x):\n  gdc_wait()")
    assert broken_rule(kernel) == "has no parameter STARTS_EARLY"
