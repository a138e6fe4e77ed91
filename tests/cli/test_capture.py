"""``graphkit capture``: results on stdout, the rest on stderr, and its exit codes."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace

import pytest

from graphkit.cli.exits import describe
from graphkit.cli.targets import (
    TargetSelection,
    announce,
    sizes_of_a_first_look,
)
from graphkit.errors import TargetError
from graphkit.records import CaptureRecord, MemoryEstimate
from graphkit.spec import ForwardMode

WITHOUT_GRAPHS = """
import dataclasses
import graphkit as gk
from graphkit.engine.attention import SdpaAttention
from graphkit.models.reference import reference_target

class NoUniformStride(SdpaAttention):
    def supports(self, mode):
        return mode is not gk.ForwardMode.DRAFT_EXTEND_V2

made = reference_target(max_batch_size=1, attention=NoUniformStride)
modes = gk.ForwardMode.DRAFT_EXTEND_V2, gk.ForwardMode.DRAFT_EXTEND
forwards = {mode: made.forwards[mode] for mode in modes}
target = dataclasses.replace(made, forwards=forwards, engine=None)
"""


@pytest.mark.parametrize(
    ("largest", "named", "sizes"),
    [
        (8, None, None),
        (64, [3], None),
        (64, None, [1, 2, 4, 8, 16, 32, 64]),
        (48, None, [1, 2, 4, 8, 16, 32, 48]),
    ],
)
def test_a_first_look_captures_powers_of_two(tiny, largest, named, sizes):
    target = importlib.import_module(tiny).right
    limits = replace(target.sizes, max_batch_size=largest)
    target = replace(target, sizes=limits, batch_sizes=named)
    assert sizes_of_a_first_look(target) == sizes


def modes_of(text):
    """The modes of the table, each with its sizes below it."""
    table = text[text.index("mode and size") :].partition("\n\n")[0].splitlines()[1:]
    return [line.split()[0] for line in table if re.match(r"[A-Z0-9_]+  ", line)]


def test_a_correct_target_gives_a_table_of_its_modes(run, tiny):
    ended = run("capture", f"{tiny}:right")
    assert ended.code == 0
    assert ended.out.startswith("tiny\ndevice    cpu\nbackend   recorder\n")
    assert modes_of(ended.out) == ["TARGET_VERIFY", "DECODE"]
    assert re.findall(r"^  size (\d)", ended.out, re.MULTILINE) == ["1", "2"] * 2
    assert "6 live batches replayed" in ended.out
    assert not ended.messages, "progress is for terminals"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "TARGET_VERIFY, DECODE of tiny on cpu: 2 sizes per mode, up to 2 requests"),
        (("--mode", "decode"), "DECODE of tiny on cpu: 2 sizes, up to 2 requests"),
        (("--mode", "decode") * 2, "DECODE of tiny on cpu: 2 sizes, up to 2 requests"),
        (("--batch-sizes", "2"), "TARGET_VERIFY, DECODE of tiny on cpu: 1 size per mode, up to"),
    ],
)
@pytest.mark.parametrize("command", ["capture", "inspect"])
def test_the_work_is_announced_before_it_starts(run, tiny, monkeypatch, command, options, text):
    def no_work(*_, **__):
        raise LookupError("starts")

    monkeypatch.setattr("graphkit.audit.runs.capture.capture_target", no_work)
    lines = run(command, f"{tiny}:right", *options).err.splitlines()
    assert lines[0].startswith(f"capturing {text}")
    assert lines[1].startswith("error: LookupError: starts")


def test_kernel_compilation_is_announced_on_cuda(tiny, capsys):
    target = importlib.import_module(tiny).right
    announce("capturing", TargetSelection(target, [ForwardMode.DECODE], None, "cuda:0"), None)
    assert capsys.readouterr().err == (
        "capturing DECODE of tiny on cuda:0: 2 sizes, up to 2 requests; "
        "kernels of a mode that Triton's cache lacks are compiled before its first size\n"
    )


def test_json_on_stdout_is_the_record_and_nothing_else(run, tiny, here):
    ended = run("capture", f"{tiny}:right", "--json", "--device", "cpu", "--out", "record.json")
    record = CaptureRecord.from_json(ended.out)
    assert (record.target, record.backend, record.mismatches) == ("tiny", "recorder", ())
    assert [mode.mode for mode in record.modes] == ["TARGET_VERIFY", "DECODE"]
    assert ended.out == record.to_json() == (here / "record.json").read_text()
    assert ended.messages == ["wrote record.json"]


def test_modes_ignore_case_and_come_in_the_order_given(run, tiny):
    options = ("--mode", "decode", "--mode", "Target_Verify", "--batch-sizes", "2", "--json")
    record = CaptureRecord.from_json(run("capture", f"{tiny}:right", *options).out)
    assert [mode.mode for mode in record.modes] == ["DECODE", "TARGET_VERIFY"]
    assert [[size.batch_size for size in mode.sizes] for mode in record.modes] == [[2], [2]]


@pytest.mark.slow
def test_every_mode_of_the_reference_model_is_correct(run):
    ended = run("capture", "--batch-sizes", "2")
    assert ended.code == 0
    assert modes_of(ended.out) == [
        "TARGET_VERIFY", "DECODE", "DRAFT", "DRAFT_EXTEND", "DRAFT_EXTEND_V2", "MULTI_LAYER_EAGLE",
        "STEP",
    ]  # fmt: skip
    text = " ".join(ended.out.split())
    assert "60 live batches replayed: each equals the padded path" in text
    assert "STEP: 10 live batches replayed: each equals the padded step" in text
    assert "8 steps in one launch, as in single replays" in text


@pytest.mark.slow
def test_the_modes_of_draft_models_can_be_named(run):
    options = ("--mode", "draft_extend_v2", "--mode", "Multi_Layer_EAGLE", "--batch-sizes", "1")
    ended = run("capture", *options)
    assert ended.code == 0
    assert modes_of(ended.out) == ["DRAFT_EXTEND_V2", "MULTI_LAYER_EAGLE"]
    assert "18 live batches replayed" in ended.out


@pytest.mark.slow
def test_a_mode_without_graphs_has_a_table_without_sizes(run, here):
    (here / "eager_target.py").write_text(WITHOUT_GRAPHS)
    ended = run("capture", "eager_target:target", "--out", "record.json")
    assert ended.code == 0
    assert modes_of(ended.out) == ["DRAFT_EXTEND_V2", "DRAFT_EXTEND"]
    assert "DRAFT_EXTEND_V2 stays eager: " in ended.out
    modes = {mode.mode: len(mode.sizes) for mode in CaptureRecord.load("record.json").modes}
    assert modes == {"DRAFT_EXTEND_V2": 0, "DRAFT_EXTEND": 1}


@pytest.mark.slow
def test_an_audit_of_a_mode_without_graphs_does_not_pass(run, here):
    (here / "eager_target.py").write_text(WITHOUT_GRAPHS)
    options = "--mode", "draft_extend_v2", "--only", "pads,frozen"
    ended = run("audit", "eager_target:target", *options)
    assert ended.code == 3
    assert ended.messages[-1] == "error: nothing audited: no check could be made"


def test_a_mismatch_fails_and_is_located(run, tiny, here):
    ended = run("capture", f"{tiny}:leaks", "--mode", "target_verify", "--out", "record.json")
    assert ended.code == 1
    text = " ".join(ended.out.split())
    assert "1 of 3 replays is wrong" in text
    assert "TARGET_VERIFY, 1 request at size 2: padding changes live rows: " in text
    assert "next_token_logits row 0 (request 0) is" in text
    (mismatch,) = CaptureRecord.load(here / "record.json").mismatches
    assert (mismatch.mode, mismatch.batch_size, mismatch.padded_batch_size) == (
        "TARGET_VERIFY", 1, 2,
    )  # fmt: skip


def test_many_mismatches_are_counted_and_listed_in_the_json(run, tiny):
    arguments = ("capture", f"{tiny}:leaks_often")
    ended, listed = run(*arguments), run(*arguments, "--json")
    record = CaptureRecord.from_json(listed.out)
    assert (ended.code, listed.code, len(record.mismatches)) == (1, 1, 20)
    text = " ".join(ended.out.split())
    assert text.count("padding changes live rows") == 10
    assert "and 10 more; --json lists all" in text


def test_a_replay_with_two_mismatches_is_one_wrong_replay(run, tiny):
    ended = run("capture", f"{tiny}:bakes", "--mode", "decode")
    text = " ".join(ended.out.split())
    assert text.count("the graph differs from the same padded path without it") == 3
    assert text.count("padding changes live rows") == 3
    assert "3 of 3 replays are wrong" in text


def test_a_forward_that_cannot_be_captured_fails_on_one_line(run, tiny, here):
    ended = run("capture", f"{tiny}:syncs", "--out", "record.json")
    assert (ended.code, ended.out) == (1, "")
    assert "cannot capture TARGET_VERIFY at batch size 2: host synchronisation" in ended.error
    assert f"{tiny}.py:" in ended.error
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", ["capture", "inspect", "audit"])
def test_a_failing_sample_batch_is_an_error_on_one_line(run, tiny, command):
    ended = run(command, f"{tiny}:gives_none")
    assert (ended.code, ended.out) == (2, "")
    assert ended.error.startswith("error: target 'tiny': sample_batch(TARGET_VERIFY, ")
    assert ended.error.endswith(" raised LookupError: no batch today.")


def test_an_exception_of_a_target_is_an_error_on_one_line(run, tiny):
    ended = run("audit", f"{tiny}:bad_setter")
    assert (ended.code, ended.out) == (1, "")
    assert (
        ended.error == "error: LookupError: no batch today. Run graphkit -v to see the traceback."
    )
    with pytest.raises(LookupError, match="at all"):
        run("-v", "audit", f"{tiny}:bad_setter")


@pytest.mark.parametrize("verbose", [(), ("-v",)])
def test_an_interruption_exits_with_130_without_a_traceback(run, tiny, verbose):
    ended = run(*verbose, "capture", f"{tiny}:stops")
    assert (ended.code, ended.out) == (130, "")
    assert ended.messages[-1] == "error: interrupted"
    assert "Traceback" not in ended.err


def test_verbose_raises_the_error_with_its_traceback(run):
    with pytest.raises(TargetError):
        run("-v", "capture", "no_such_module_here:x")


def test_an_estimate_prints_memory_and_keeps_no_graph(run, tiny, tmp_path):
    file = tmp_path / "memory.json"
    ended = run("capture", f"{tiny}:right", "--estimate", "--out", str(file))
    assert ended.code == 0
    estimate = MemoryEstimate.load(file)
    assert [mode.mode for mode in estimate.graphs] == ["TARGET_VERIFY", "DECODE"]
    assert ended.out.startswith(
        f"{estimate.total / 2**10:,.1f} KiB of memory with graphs of 4 sizes"
    )
    for name in ("graph pools", "executables", "static buffers", "kv", "workspace"):
        assert name in ended.out
    assert "replayed" not in ended.out, "no replay is checked"
    as_json = run("capture", f"{tiny}:right", "--estimate", "--json")
    assert MemoryEstimate.from_json(as_json.out) == estimate
    record = CaptureRecord.from_json(run("capture", f"{tiny}:right", "--json").out)
    assert estimate.graph_pools == sum(size.pool_bytes for size in record.sizes)


def test_an_error_of_several_lines_is_printed_on_one():
    assert describe(TargetError("row 0 differs.\n  called at a.py:3\n  Check it.")) == (
        "row 0 differs. called at a.py:3 Check it."
    )
