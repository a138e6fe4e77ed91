"""Scenarios of audited programs on several ranks. Every rank runs every function."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch.distributed as dist
from graphbugs import frame

PROGRAM = """
import torch.distributed as dist
from graphbugs.frame import capture, new_graph, numbered
import graphkit as gk

def program():
    graphs, reduces = {}, %s
    if reduces:
        dist.all_reduce(numbered(4))  # NCCL connects outside of a capture
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


def found_on_all_ranks(reduces):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"program_{reduces}.py"
        path.write_text(PROGRAM % reduces)
        report = frame.audited(path, path)
    texts = [finding.text for finding in report.findings if finding.kind == "wrong graph"]
    all_texts = [None] * dist.get_world_size()
    dist.all_gather_object(all_texts, texts)
    return [text for texts in all_texts for text in texts]
