"""What a program may ask of its audit, and the options that its processes receive."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphkit as gk
from graphkit.audit.foreign import GraphContents, GraphDigest, MemoryContents
from graphkit.audit.foreign.audit_options import AuditOptions


@pytest.mark.parametrize("ask", [gk.audit_graphs, gk.graph_digest])
def test_without_an_audit_the_request_says_what_to_do(ask):
    with pytest.raises(gk.ConfigError, match="graphkit record --audit"):
        ask()


def test_digests_of_the_same_memory_have_no_difference():
    memory = {16: MemoryContents("weight", "w", 3, is_zero=False)}
    before = GraphDigest({"a": GraphContents((("mm", "1"),), memory)}, 0)
    assert gk.compare_digest(before, before) == ()


def test_a_node_that_differs_is_an_error_and_graphs_share_a_weight():
    memory = {16: MemoryContents("weight", "w", 3, is_zero=False, reader="`mm` (node 0)")}
    zeroed = {16: MemoryContents("weight", "w", 0, is_zero=True)}
    before = GraphDigest({name: GraphContents((("mm", "1"),), memory) for name in "ab"}, 0)
    after = GraphDigest(
        {"a": GraphContents((("mm", "2"),), zeroed), "b": GraphContents((("mm", "1"),), zeroed)}, 1
    )
    found = {each.kind: each for each in gk.compare_digest(before, after)}
    assert {each.severity for each in found.values()} == {"error"}
    assert found["template differs"].modes == ("a",)
    assert found["template differs"].text.startswith("node 0, `mm`, is `mm` now")
    assert found["weight differs"].modes == ("a", "b")
    assert "`mm` (node 0)" in found["weight differs"].text


@pytest.mark.parametrize(
    ("kind", "checksum", "severities"),
    [
        ("pool", 0, (["error"], [])), ("pool", 4, (["note"], [])), ("tensor", 0, (["note"], [])),
        ("weight", 0, (["error"], ["error"])), ("pool", None, (["error"], ["error"])),
    ],
)  # fmt: skip
def test_what_replays_write_is_compared_only_without_one(kind, checksum, severities):
    """Memory that is gone is an error in any case."""

    def printed(checksum, replays):
        memory = {16: MemoryContents(kind, "w", checksum, is_zero=checksum == 0)}
        return GraphDigest({"a": GraphContents((), memory)}, replays)

    before = printed(3, 0)
    for replays, expected in enumerate(severities):
        found = gk.compare_digest(before, printed(checksum, replays))
        assert [each.severity for each in found] == expected


@pytest.mark.parametrize("value", [None, 5, "x", {}])
def test_a_digest_of_another_type_is_refused(value):
    with pytest.raises(gk.ConfigError, match="before must be a GraphDigest"):
        gk.compare_digest(value)


@pytest.mark.parametrize("nodes", [None, ("engine.py:3 in capture #2", 7)])
def test_options_pass_through_the_environment(monkeypatch, tmp_path, nodes):
    options = AuditOptions(
        report=tmp_path / "r.json", every=3, seconds=1.5, megabytes=100, find_fault=True,
        node_by_node=nodes,
    )  # fmt: skip
    for name, value in options.environment().items():
        monkeypatch.setenv(name, value)
    assert AuditOptions.from_environment() == options


def test_a_variable_that_is_no_number_keeps_the_default(monkeypatch):
    monkeypatch.setenv("GRAPHKIT_AUDIT", "r.json")
    monkeypatch.setenv("GRAPHKIT_AUDIT_EVERY", "often")
    assert AuditOptions.from_environment() == AuditOptions(report=Path("r.json").absolute())
