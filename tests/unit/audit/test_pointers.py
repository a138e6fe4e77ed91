"""Tests of the check of a graph's pointers and of input fields that no node reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphkit.audit import Check
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.pointers import audit_pointers, check_pointers
from graphkit.models.reference import reference_target
from graphkit.records import Argument, Environment, GraphRecord, Node, Pointer
from tiny_target import log_of, logits_of, small_target

GLOBAL = None
"""A tensor in a test: searches skip objects that are older than the tests."""
HERE = Environment(device="cpu", torch="2", triton="", cuda="", driver="", graphkit="0")


def audited(forward, **declared):
    """Return the findings of a forward that returns logits [T, 32]."""
    target = small_target(logits_of(forward), requests=2, **declared)
    return log_of(audit_pointers, target, batch_sizes=[2]).findings


@pytest.fixture
def model():
    return nn.Embedding(32, 32)


def reads_all(i):
    """Return a column that depends on every field."""
    per_request = (i.req_pool_indices + i.seq_lens).repeat_interleave(4, output_size=i.num_tokens)
    return (i.input_ids + i.positions + i.out_cache_loc + per_request)[:, None].float()


def test_a_graph_that_reads_only_declared_memory_has_no_finding(model):
    assert not audited(lambda i: model(i.input_ids) + reads_all(i), weights=model)


@pytest.mark.parametrize(
    ("make_value", "kinds"), [(float, []), (torch.tensor, ["undeclared memory"])]
)
def test_a_python_number_needs_no_declaration(model, make_value, kinds):
    value = make_value(0.5)

    def forward(i):
        logits = model(i.input_ids) + reads_all(i)
        logits[:, 3] = value
        return logits

    assert [finding.kind for finding in audited(forward, weights=model)] == kinds


def test_undeclared_memory_of_live_objects_is_a_note_that_says_where_it_is_found(model):
    mask = torch.ones(32)
    (finding,) = audited(lambda i: model(i.input_ids) * mask + reads_all(i), weights=model)
    assert (finding.kind, finding.severity) == ("undeclared memory", "note")
    assert finding.names == ("<lambda>.forward.mask",)
    assert finding.kernel == "mul"
    assert finding.text == (
        f"argument 1 of `mul` (node {finding.node}) points to memory that the target does not "
        "declare. Live Python objects hold it."
    )
    assert "test_pointers.py" in finding.source
    assert "Declare it" in finding.advice


def test_a_graph_has_one_note_for_all_its_undeclared_memory(model, monkeypatch):
    monkeypatch.setitem(globals(), "GLOBAL", torch.ones(32))
    mask = torch.ones(32)
    (finding,) = audited(lambda i: model(i.input_ids) * mask * GLOBAL + reads_all(i))
    assert finding.names == (
        "<lambda>.forward.model.weight", "<lambda>.forward.mask", "test_pointers.GLOBAL",
    )  # fmt: skip


def test_memory_that_only_the_recorded_graph_holds_was_freed(model):
    held = [torch.ones(32)]

    def forward(i):
        return model(i.input_ids) * held[0] + reads_all(i)

    def replaced(i):
        logits = forward(i)
        held[0] = torch.ones(32)
        return logits

    (finding,) = audited(replaced, weights=model)
    assert (finding.kind, finding.severity) == ("freed memory", "error")
    assert "only the recorded graph still holds it" in finding.text


@pytest.mark.parametrize("name", ["mutable_state", "weights"])
def test_declared_memory_is_not_reported(model, name):
    mask = torch.ones(32)
    declared = {"weights": dict(model.named_parameters(prefix="model"))}
    declared[name] = {**declared.get(name, {}), "mask": mask}
    assert not audited(lambda i: model(i.input_ids) * mask + reads_all(i), **declared)


def test_texts_contain_no_address(model):
    """Reports of two runs are equal."""
    mask = torch.ones(32)
    (finding,) = audited(lambda i: model(i.input_ids) * mask + reads_all(i), weights=model)
    assert "0x" not in finding.text


@pytest.mark.parametrize(
    "name", ["req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc"]
)
def test_a_field_that_no_node_reads_is_reported(model, name):
    def forward(i):
        mine = {field: getattr(i, field) for field in ("input_ids", "positions", "out_cache_loc")}
        mine |= {"req_pool_indices": i.req_pool_indices, "seq_lens": i.seq_lens}
        left = [rows.sum() for field, rows in mine.items() if field != name]
        return model.weight[:8] + sum(left)

    (finding,) = audited(forward, weights=model)
    assert (finding.kind, finding.severity) == ("dead input", "warning")
    assert finding.field == name


def test_the_reference_target_declares_all_its_memory():
    target = reference_target("cpu", max_batch_size=2)
    for mode in target.forwards:
        log = log_of(audit_pointers, target, mode=mode, batch_sizes=[2])
        assert not log.findings
        assert {check.mode for check in log.checks} == {mode.name}


def checked(*, memory, kind="pointer", size=8, offset=0, kernel="kernel", address=1 << 41, op=""):
    """Return the check of a graph of one node with one pointer."""
    pointer = Pointer(address=address, memory=memory, name=f"{memory} block", offset=offset)
    argument = Argument(size=size, kind=kind, text="", pointers=(pointer,))
    node = Node(
        index=0, kind="kernel", name=kernel, short_name=kernel, arguments=(argument,), op=op
    )
    return checked_node(node)


def checked_node(node):
    check = Check("pointers", "DECODE", 1)
    record = GraphRecord(name="g", backend="cuda", environment=HERE, nodes=(node,))
    check_pointers(record, check, LiveTensors())
    return check


@pytest.mark.parametrize("memory", ["weight", "input", "state", "pool", "mailbox"])
def test_declared_memory_is_only_counted(memory):
    check = checked(memory=memory)
    assert not check.findings
    assert check.text == f"1 address: 1 {memory}"


def test_freed_memory_is_an_error():
    (finding,) = checked(memory="freed").findings
    assert (finding.kind, finding.severity) == ("freed memory", "error")
    assert finding.text == (
        "argument 0 of `kernel` (node 0) points to memory that was freed (freed block)."
    )


def test_memory_that_no_tensor_holds_is_a_workspace():
    tensor = torch.zeros(64)
    inside = tensor.data_ptr() + 128
    (finding,) = checked(memory="external", address=inside).findings
    assert finding.kind == "undeclared memory"
    check = checked(memory="external", address=tensor.data_ptr() + tensor.nbytes + (1 << 41))
    assert not check.findings
    assert check.text == "1 address: 1 workspace"


@pytest.mark.parametrize(
    ("kernel", "offset", "is_reported"),
    [
        ("void at::native::elementwise_kernel<4>(int)", 8, True),
        ("void at::native::elementwise_kernel<4>(int)", 64, False),
        ("void at::native::elementwise_kernel<4>(int)", 512, False),
        ("nvjet_tst", 64, True),
        ("sgemm_largek_lds64", 512, True),
    ],
)
def test_bytes_that_torch_kernels_may_leave_unset_are_ignored(kernel, offset, is_reported):
    check = checked(memory="freed", kind="struct", size=1720, offset=offset, kernel=kernel)
    assert bool(check.findings) is is_reported
    assert check.text == ("1 address: 1 freed" if is_reported else "0 addresses")


def test_unset_bytes_of_an_attributed_node_give_a_warning():
    kernel = "void at::native::reduce_kernel<512>(int)"
    check = checked(memory="freed", kind="struct", size=944, offset=880, kernel=kernel, op="sum")
    assert [finding.severity for finding in check.findings] == ["warning"]
    assert check.text == "0 addresses"  # other captures may not have it


def test_an_unreadable_argument_is_reported():
    node = Node(
        index=0, kind="kernel", name="k", short_name="k",
        arguments=(Argument(size=8, kind="unreadable", text="unreadable"),),
    )  # fmt: skip
    (finding,) = checked_node(node).findings
    assert finding.kind == "unreadable argument"
    assert "does not return argument 0 of `k` (node 0)" in finding.text
