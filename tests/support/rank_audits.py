"""Scenarios of audited programs on several ranks. Every rank runs every function."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from graphbugs import frame

from graphkit.audit.foreign.audits import lockstep

PROGRAM = """
import torch.distributed as dist
from graphbugs.frame import capture, new_graph, numbered
import graphkit as gk

def program():
    graphs, reduces = {}, %s
    for size in (2, 4):
        rows, graph = numbered(4), new_graph()
        with capture(graph):
            if reduces:
                dist.all_reduce(rows)
            rows.mul_(2)
        gk.foreign.register(graph, name=f"verify {size}", key=lambda size=size: size)
        graphs[size] = graph
    for number in range(3):
        size = 2 if number < 2 else 2 + 2 * dist.get_rank()
        graphs[size].replay()
"""


def replay_different_keys():
    """Ranks that replay graphs of two keys are named if the graphs have collectives."""
    found = found_on_all_ranks("True")
    assert found, "the last rank to arrive sees the other"
    assert all("as replay 3" in text and "verify 4 for 4" in text for text in found), found


def replay_different_keys_without_collectives():
    """Ranks may replay graphs of two keys that do not wait for each other."""
    assert found_on_all_ranks("False") == []


REGISTERED = """
import torch.distributed as dist
from graphbugs.frame import capture, new_graph, numbered, tensor
import graphkit as gk

rows, out = numbered(4), tensor(4, 4, value=0)

def body():
    summed = rows.clone()
    dist.all_reduce(summed)
    if dist.get_rank() == %d:
        summed[0].add_(summed[3])  # row 3 is a pad
    return summed

def program():
    graph = new_graph()
    body()  # sets up NCCL
    with capture(graph):
        out.copy_(body())
    gk.foreign.register(
        graph, body=body, live_rows=lambda: 3, outputs=out, inputs={"rows": (rows, 0, None)},
        name="decode",
    )
    for _ in range(3):
        graph.replay()
    assert (out[1] == 2 * rows[1]).all()
"""
ALONE = """
import torch.distributed as dist
from graphbugs.frame import capture, new_graph, numbered

def program():
    graph, rows = new_graph(), numbered(4)
    with capture(graph):
        rows.mul_(2)
    for _ in range(3 if dist.get_rank() == 0 else 0):
        graph.replay()
"""


def check_together(wrong_rank=1):
    """Graphs with collectives are repeated on all ranks. One rank's pads leak, and it says so."""
    report = audited(REGISTERED % wrong_rank, "registered")
    kinds = [finding.kind for finding in report.findings if finding.severity == "error"]
    assert kinds == ["leaking pad row"] * (dist.get_rank() == wrong_rank), report.findings
    texts = {check.audit: check.text for check in report.checks if check.mode == "decode"}
    assert texts["shadow"].startswith("compared 3 live rows"), texts
    assert texts["pool-poison"].startswith("overwrote"), texts


def check_rank_0_with_others():
    """The same if the other rank ends its check first."""
    check_together(0)


def check_right_ranks():
    """No rank is wrong."""
    check_together(2)


def check_with_a_rank_that_cannot():
    """No rank waits for one that has no memory for the check."""
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(frame.RecorderDevice, "free_bytes", lambda _: 0)
        report = audited(REGISTERED % 2, "registered")
    assert time.monotonic() - began < lockstep.WAIT_S / 2
    (text,) = {check.text for check in report.checks if check.audit == "pool-poison"}
    assert text.startswith("not checked: ")
    assert ("rank 1 cannot" in text) == (dist.get_rank() == 0)


def check_without_a_rank():
    """A rank waits once for one that replays nothing, and its program goes on."""
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep, "WAIT_S", 1.0)
        report = audited(ALONE, "alone")
    assert time.monotonic() - began < 2.5
    if dist.get_rank() == 0:
        (text,) = [check.text for check in report.checks if check.audit == "pool-poison"]
        assert text == "not checked: a repeated replay may wait for the other 1 ranks"


def found_on_all_ranks(reduces):
    report = audited(PROGRAM % reduces, f"program_{reduces}")
    texts = [finding.text for finding in report.findings if finding.kind == "wrong graph"]
    all_texts = [None] * dist.get_world_size()
    dist.all_gather_object(all_texts, texts)
    return [text for texts in all_texts for text in texts]


def audited(program, name):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(program)
        return frame.audited(path, path)
