"""Every broken model has its finding in its audit, and the sound model has none."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import graphkit as gk
from graphkit.audit import AUDITS, audit_target
from graphkit.audit.locate_target import locate
from graphkit.testing import assert_target_equivalent

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BROKEN = ROOT / "tools" / "examples" / "broken"
FOUND = [
    ("python_temperature", "frozen", "frozen value", "follows `temperature` ("),
    (
        "frozen_temperature",
        "frozen",
        "frozen value",
        "`Broken.python_temperature` = 1.0 is frozen in ",
    ),
    (
        "frozen_length",
        "frozen",
        "frozen value",
        "`len(Broken.adapters)` = 3 is frozen in argument 1 ",
    ),
    (
        "frozen_global",
        "frozen",
        "frozen value",
        "`frozen_global.penalty` = 1.2 is frozen in argument ",
    ),
    (
        "frozen_branch",
        "frozen",
        "frozen value",
        "`Broken.is_smooth` = True is frozen in the kernel of",
    ),
    (
        "changed_temperature",
        "shadow",
        "frozen value",
        "has changed since capture (1.0, then 0.5), ",
    ),
    ("counting_warmup", "warmup", "warm-up leak", "changed `Broken.steps` from 0 to"),
    (
        "dropped_positions",
        "wrapper",
        "wrapper differs from model",
        "row 0 of the drafts of request 0 (position 60 of request 0)",
    ),
    (
        "dropped_window",
        "wrapper",
        "wrapper differs from model",
        "row 8 of the prompt of request 0 (position 8 of request 0)",
    ),
    ("freed_weight", "pointers", "freed memory", "points to memory that was freed"),
    (
        "grown_workspace",
        "warmup",
        "replaced buffer",
        "replaced `Broken.workspace`, float32 [0, 16]",
    ),
    ("grown_workspace", "pointers", "undeclared memory", "the target does not declare"),
    (
        "lazy_mask",
        "warmup",
        "lazy cache",
        "created `Broken.masks[32]` (bool [32, 32]) from pad rows",
    ),
    ("lazy_mask", "pointers", "undeclared memory", "the target does not declare"),
    ("leaking_pad_row", "pads", "leaking pad row", "of next_token_logits (request 0 of"),
    ("leaking_pad_row", "shadow", "leaking pad row", "The first node that differs is `"),
    ("batch_maximum", "pads", "leaking pad row", "The first node that differs is `amax`"),
    ("running_sum", "pads", "rows depend on batch order", "first node that differs is `cumsum`"),
    ("batch_size_branch", "shadow", "dependence on the batch size", "Only the padded step runs `"),
    (
        "metadata_of_another_size",
        "pads",
        "metadata of another size",
        "It reads `Broken.mask` (float32 [1024]), which the forward made for another batch size",
    ),
    ("training_batch_norm", "pads", "leaking pad row", "The first node that differs is `"),
    ("undeclared_state", "warmup", "undeclared state", "rows of its requests in `Broken.pool`"),
    (
        "unwritten_row",
        "pool-poison",
        "stale pool memory",
        "memory allocated by `new_empty` at broken/",
    ),
    ("stale_positions", "pointers", "dead input", "no node reads the input field `positions`"),
    ("written_input", "forward", "written input", "writes into the input field `positions`"),
    ("active_dropout", "forward", "random draw", "draws random numbers outside of a sampler"),
]
"""Example, audit, kind of the finding, and a part of its text."""
LINES = {
    "unwritten_row": ("pool-poison", "broken/unwritten_row.py", "in position_term"),
    "python_temperature": ("frozen", "broken/python_temperature.py", "in scores"),
    "lazy_mask": ("warmup", "broken/lazy_mask.py", "in forward"),
    "counting_warmup": ("warmup", "broken/counting_warmup.py", "in forward"),
    "grown_workspace": ("warmup", "broken/grown_workspace.py", "in history_term"),
    "undeclared_state": ("warmup", "broken/undeclared_state.py", "in history_term"),
    "freed_weight": ("pointers", "broken/freed_weight.py", "in scores"),
    "written_input": ("forward", "broken/written_input.py", "in position_term"),
    "active_dropout": ("forward", "broken/sound.py", "in forward"),
    "dropped_window": ("wrapper", "mistral/modeling_mistral.py", "in forward"),
    "dropped_positions": ("wrapper", "llama/modeling_llama.py", "in forward"),
    "frozen_temperature": ("frozen", "broken/python_temperature.py", "in scores"),
    "frozen_length": ("frozen", "broken/frozen_length.py", "in scores"),
    "frozen_global": ("frozen", "broken/frozen_global.py", "in scores"),
    "frozen_branch": ("frozen", "broken/frozen_branch.py", "in scores"),
    "changed_temperature": ("shadow", "broken/python_temperature.py", "in scores"),
    "batch_maximum": ("pads", "broken/batch_maximum.py", "in history_term"),
    "running_sum": ("pads", "broken/running_sum.py", "in history_term"),
    "batch_size_branch": ("shadow", "broken/batch_size_branch.py", "in history_term"),
    "metadata_of_another_size": (
        "pads",
        "broken/metadata_of_another_size.py",
        "in history_term",
    ),
    "training_batch_norm": ("pads", "broken/sound.py", "in forward"),
    "leaking_pad_row": ("pads", "broken/sound.py", "in forward"),
}
"""Audit, file and function that the finding names as its source."""

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Change to the folder in which the examples can be imported."""
    monkeypatch.chdir(ROOT)


@cache
def audited(name, device, *only):
    target = locate(f"tools.examples.broken.{name}:target", device)
    return audit_target(target, device=device, only=only or None).findings


def audited_for(name, device, audit):
    """Return findings with those of an audit; on the CPU, from the run of all that tests share.

    A report has one finding per cause: there, ``pads`` reports what ``shadow`` finds.
    """
    is_alone = device == "cuda" or (name, audit) == ("leaking_pad_row", "shadow")
    return audited(name, device, *((audit,) if is_alone else ()))


@devices
def test_the_sound_model_has_no_finding_but_its_constants(device):
    report = audit_target(locate("tools.examples.broken.sound:target", device), device=device)
    # Other tests of this process use more streams.
    (finding,) = [each for each in report.findings if each.audit != "launch"]
    assert (finding.severity, finding.names) == ("note", ("sound.CONTEXT = 64",))
    assert {check.audit for check in report.checks} == set(AUDITS)


@devices
@pytest.mark.parametrize(("name", "audit", "kind", "text"), FOUND)
def test_a_broken_model_is_found(name, audit, kind, text, device):
    found = [each for each in audited_for(name, device, audit) if each.kind == kind]
    assert any(text in finding.text for finding in found), found
    assert {finding.audit for finding in found} == {audit}
    assert all(finding.advice for finding in found)


FIRST = {
    "python_temperature": ("error", "frozen value"),
    "counting_warmup": ("error", "warm-up leak"),
    "dropped_positions": ("error", "wrapper differs from model"),
    "dropped_window": ("error", "wrapper differs from model"),
    "changed_temperature": ("error", "frozen value"),
    "freed_weight": ("error", "freed memory"),
    "frozen_branch": ("note", "frozen value"),
    "frozen_global": ("note", "frozen value"),
    "frozen_length": ("note", "frozen value"),
    "frozen_temperature": ("note", "frozen value"),
    "grown_workspace": ("error", "replaced buffer"),
    "lazy_mask": ("error", "lazy cache"),
    "leaking_pad_row": ("error", "leaking pad row"),
    "unwritten_row": ("error", "stale pool memory"),
    "stale_positions": ("warning", "dead input"),
    "written_input": ("error", "written input"),
    "active_dropout": ("note", "random draw"),
    "batch_maximum": ("error", "leaking pad row"),
    "running_sum": ("error", "rows depend on batch order"),
    "batch_size_branch": ("error", "dependence on the batch size"),
    "metadata_of_another_size": ("error", "metadata of another size"),
    "training_batch_norm": ("error", "leaking pad row"),
    "undeclared_state": ("warning", "undeclared state"),
}
"""Severity and kind of the first finding of all audits."""
FIRST_IF_BARE = FIRST | {"dropped_positions": ("error", "rows depend on batch order")}
"""The same for targets that declare no weights and state."""


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "bare"])
def test_the_planted_error_comes_first_and_once(name, is_declared):
    if is_declared:
        findings = audited(name, "cpu")
    else:
        target = locate(f"tools.examples.broken.{name}:target", "cpu")
        bare = replace(target, weights=None, mutable_state=None)
        findings = audit_target(bare, device="cpu").findings
        # The undeclared cache is a warning, too.
        is_planted = name == "undeclared_state"
        findings = tuple(e for e in findings if is_planted or e.kind != "undeclared state")
    findings = tuple(each for each in findings if each.kind != "architecture constants")
    first, *others = findings
    assert (first.severity, first.kind) == (FIRST if is_declared else FIRST_IF_BARE)[name]
    assert first.source or name == "stale_positions", "a field that no node reads has no line"
    assert set(first.batch_sizes) <= {2, 8}
    assert (first.severity, first.kind) not in [(each.severity, each.kind) for each in others]
    # What else follows from an unwritten row depends on what its memory happens to hold.
    assert len(others) <= 3 or name == "unwritten_row"


@pytest.mark.parametrize(
    "name",
    ["leaking_pad_row", "batch_size_branch", "metadata_of_another_size", "training_batch_norm"],
)
def test_the_kit_gives_the_cause_the_same_name_and_line(name):
    finding = audited(name, "cpu")[0]
    with pytest.raises(AssertionError) as caught:
        assert_target_equivalent(
            locate(f"tools.examples.broken.{name}:target", "cpu"), device="cpu"
        )
    bug, place = str(caught.value).splitlines()[-2:]
    assert bug.startswith(f"  probable bug: {finding.kind}.")
    assert place.endswith(finding.source)


@pytest.mark.parametrize(
    "name",
    [
        "broken.sound:target",
        "own_target:target",
        "mamba:target",
    ],
)
def test_a_correct_model_that_declares_nothing_has_no_error_and_few_notes(name):
    target = locate(f"tools.examples.{name}", "cpu")
    bare = replace(target, weights=None, mutable_state=None, host_values={}, model=None)
    sizes = [2, target.sizes.max_batch_size]
    findings = audit_target(bare, batch_sizes=sizes, device="cpu").findings
    assert 1 <= len(findings) <= 5
    assert not [each for each in findings if each.severity == "error"]


@devices
@pytest.mark.parametrize("name", LINES)
def test_a_finding_names_the_line(name, device):
    audit, file, function = LINES[name]
    found = audited_for(name, device, audit)
    sources = {each.source for each in found if each.audit == audit}
    assert any(source.startswith(file) and source.endswith(function) for source in sources), sources


MODULES = {"dropped_window": "model.layers.0.self_attn", "dropped_positions": "model"}


@pytest.mark.parametrize("name", MODULES)
def test_a_wrapper_that_drops_something_leads_to_the_module(name):
    (found,) = audited(name, "cpu", "wrapper")
    assert found.module == MODULES[name]


@devices
def test_a_host_synchronisation_is_found_by_any_capture(device):
    with pytest.raises(gk.CaptureError, match=r"host synchronisation in .*host_sync.py:"):
        audited("host_sync", device)


def test_every_broken_model_is_tested():
    names = {path.stem for path in BROKEN.glob("*.py")}
    assert names - LINES.keys() == {"sound", "host_sync", "stale_positions"}
    assert names == {"sound", "host_sync", *(name for name, *_ in FOUND)}


@pytest.mark.parametrize("path", sorted(BROKEN.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_states_its_error_and_effect(path):
    text = path.read_text()
    assert f"graphkit audit tools.examples.broken.{path.stem}:target" in text
    is_explained = "\nError: " in text and "\nEffect: " in text
    assert is_explained == (path.stem != "sound")
