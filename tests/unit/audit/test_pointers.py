"""What a graph points to: declared, undeclared, freed; and what it should read but does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit import AuditLog, Check
from graphkit.audit.live_tensors import LiveTensors
from graphkit.audit.pointers import audit_pointers, judge_pointers
from graphkit.records import Argument, Environment, GraphRecord, Node, Pointer
from graphkit.reference import reference_target

MODE = gk.ForwardMode.TARGET_VERIFY
HERE = Environment(device="cpu", torch="2", triton="", cuda="", driver="", graphkit="0")


def sample(_mode, batch_size, _seed):
    return gk.TargetVerifyInputs(
        req_pool_indices=np.arange(1, batch_size + 1),
        seq_lens=np.full(batch_size, 4, np.int32),
        input_ids=np.arange(4 * batch_size),
        positions=np.arange(4 * batch_size),
        out_cache_loc=np.arange(1, 4 * batch_size + 1),
    )


def audited(forward, **declared):
    """The findings of a forward that makes logits [T, 32], as (kind, severity, field or text)."""
    target = gk.CaptureTarget(
        name="tiny",
        spec=gk.SpecConfig("EAGLE", num_steps=3, topk=1, num_draft_tokens=4),
        sizes=gk.BufferSizes(2, 128, 16, 32, torch.float32),
        forwards={MODE: lambda i: gk.ForwardOutput(next_token_logits=forward(i))},
        sample_batch=sample,
        **declared,
    )
    log = AuditLog()
    with target.runner(MODE, batch_sizes=[2], device="cpu") as runner:
        runner.capture(attribution=gk.Attribution(target.weights))
        audit_pointers(target, runner, log)
    return log.findings


@pytest.fixture
def model():
    return nn.Embedding(32, 32)


def reads_all(i):
    """A row that depends on every field."""
    per_request = (i.req_pool_indices + i.seq_lens).repeat_interleave(4, output_size=i.num_tokens)
    return (i.input_ids + i.positions + i.out_cache_loc + per_request)[:, None].float()


def test_a_graph_that_reads_only_what_was_declared_has_no_finding(model):
    assert not audited(lambda i: model(i.input_ids) + reads_all(i), weights=model)


@pytest.mark.parametrize(
    ("value", "kinds"), [(0.5, []), (torch.tensor(0.5), ["undeclared memory"])], ids=str
)
def test_a_number_that_python_writes_is_no_memory_unless_somebody_holds_it(model, value, kinds):

    def forward(i):
        logits = model(i.input_ids) + reads_all(i)
        logits[:, 3] = value
        return logits

    assert [finding.kind for finding in audited(forward, weights=model)] == kinds


def test_memory_that_nobody_declared_is_found_with_its_reader(model):
    mask = torch.ones(32)
    (finding,) = audited(lambda i: model(i.input_ids) * mask + reads_all(i), weights=model)
    assert (finding.kind, finding.severity) == ("undeclared memory", "error")
    assert finding.kernel == "mul"
    assert "test_pointers.py" in finding.source
    assert "Declare it" in finding.advice


@pytest.mark.parametrize("name", ["mutable_state", "weights"])
def test_declaring_it_is_enough(model, name):
    mask = torch.ones(32)
    declared = {"weights": dict(model.named_parameters(prefix="model"))}
    declared[name] = {**declared.get(name, {}), "mask": mask}
    assert not audited(lambda i: model(i.input_ids) * mask + reads_all(i), **declared)


def test_a_text_names_no_address(model):
    """So that two runs make the same report."""
    mask = torch.ones(32)
    (finding,) = audited(lambda i: model(i.input_ids) * mask + reads_all(i), weights=model)
    assert "0x" not in finding.text


@pytest.mark.parametrize(
    "name", ["req_pool_indices", "seq_lens", "input_ids", "positions", "out_cache_loc"]
)
def test_a_field_that_no_node_reads_is_found(model, name):
    def forward(i):
        mine = {field: getattr(i, field) for field in ("input_ids", "positions", "out_cache_loc")}
        mine |= {"req_pool_indices": i.req_pool_indices, "seq_lens": i.seq_lens}
        left = [rows.sum() for field, rows in mine.items() if field != name]
        return model.weight[:8] + sum(left)

    (finding,) = audited(forward, weights=model)
    assert (finding.kind, finding.severity) == ("dead input", "warning")
    assert finding.field == name


def test_the_reference_target_points_only_to_what_it_declares():
    target = reference_target("cpu", max_batch_size=2)
    log = AuditLog()
    for mode in target.forwards:
        with target.runner(mode, batch_sizes=[2], device="cpu") as runner:
            runner.capture(attribution=gk.Attribution(target.weights))
            audit_pointers(target, runner, log)
    assert not log.findings
    assert {check.mode for check in log.checks} == {mode.name for mode in target.forwards}


def judged(*, memory, kind="pointer", size=8, offset=0, kernel="kernel", address=1 << 41, op=""):
    """The look at a graph of one node with one address."""
    pointer = Pointer(address=address, memory=memory, name=f"{memory} block", offset=offset)
    argument = Argument(size=size, kind=kind, text="", pointers=(pointer,))
    node = Node(
        index=0, kind="kernel", name=kernel, short_name=kernel, arguments=(argument,), op=op
    )
    return judged_node(node)


def judged_node(node):
    look = Check("pointers", "DECODE", 1)
    record = GraphRecord(name="g", backend="cuda", environment=HERE, nodes=(node,))
    judge_pointers(record, check, LiveTensors())
    return look


@pytest.mark.parametrize("memory", ["weight", "input", "state", "pool", "mailbox"])
def test_declared_memory_is_counted_alone(memory):
    look = judged(memory=memory)
    assert not check.findings
    assert check.text == f"1 addresses: 1 {memory}"


def test_freed_memory_is_an_error():
    (finding,) = judged(memory="freed").findings
    assert (finding.kind, finding.severity) == ("freed memory", "error")
    assert "which was freed" in finding.text


def test_memory_outside_is_a_finding_if_a_tensor_holds_it_and_else_a_librarys():
    tensor = torch.zeros(64)
    inside = tensor.data_ptr() + 128
    (finding,) = judged(memory="external", address=inside).findings
    assert finding.kind == "undeclared memory"
    look = judged(memory="external", address=tensor.data_ptr() + tensor.nbytes + (1 << 41))
    assert not check.findings
    assert check.text == "1 addresses: 1 workspace"


@pytest.mark.parametrize(
    ("kernel", "offset", "is_told"),
    [
        ("void at::native::elementwise_kernel<4>(int)", 8, True),
        ("void at::native::elementwise_kernel<4>(int)", 64, False),
        ("void at::native::elementwise_kernel<4>(int)", 512, False),
        ("nvjet_tst", 64, True),
        ("sgemm_largek_lds64", 512, True),
    ],
)
def test_what_lies_deep_in_a_struct_counts_only_where_structs_are_filled(kernel, offset, is_told):
    look = judged(memory="freed", kind="struct", size=1720, offset=offset, kernel=kernel)
    assert bool(check.findings) is is_told
    assert check.text == ("1 addresses: 1 freed" if is_told else "no address")


def test_what_attribution_leaves_deep_in_a_struct_is_the_operations_own():
    kernel = "void at::native::reduce_kernel<512>(int)"
    look = judged(memory="freed", kind="struct", size=944, offset=880, kernel=kernel, op="sum")
    assert [finding.severity for finding in check.findings] == ["warning"]
    assert check.text == "no address"  # it may be there in one capture and not in the next


def test_an_unreadable_argument_is_found():
    node = Node(
        index=0, kind="kernel", name="k", short_name="k",
        arguments=(Argument(size=8, kind="unreadable", text="unreadable"),),
    )  # fmt: skip
    assert judged_node(node).findings[0].kind == "unreadable argument"
