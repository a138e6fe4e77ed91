"""Every broken model has its finding in its audit, and the sound model has none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

import graphkit as gk
from graphkit.audit import audit_target
from graphkit.audit.locate_target import locate
from graphkit.records.audit import USUAL_AUDITS
from graphkit.testing import assert_target_equivalent

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BROKEN = ROOT / "tools" / "examples" / "broken"


@dataclass(frozen=True)
class Planted:
    """The finding of an example: its audit, kind, a part of its text, and the line it names."""

    audit: str
    kind: str
    text: str
    function: str = ""
    file: str = ""
    severity: str = "error"


def frozen(text, file, severity="note"):
    return Planted("frozen", "frozen value", text, "scores", file, severity)


PYTHON = "broken/python_temperature.py"
FIRST_NODE = "The first node that differs is `"
PLANTED = {
    "python_temperature": frozen("follows `temperature` (", PYTHON, "error"),
    "frozen_temperature": frozen("`Broken.python_temperature` = 1.0 is frozen in ", PYTHON),
    "frozen_length": frozen("`len(Broken.adapters)` = 3 is frozen in argument 1 ", ""),
    "frozen_global": frozen("`frozen_global.penalty` = 1.2 is frozen in argument ", ""),
    "frozen_branch": frozen("`Broken.is_smooth` = True is frozen in the kernel of", ""),
    "changed_temperature": Planted(
        "shadow", "frozen value", "has changed since capture (1.0, then 0.5), ", "scores", PYTHON
    ),
    "counting_warmup": Planted("warmup", "warm-up leak", "changed `Broken.steps` from", "forward"),
    "dropped_positions": Planted(
        "wrapper", "wrapper differs from model",
        "row 0 of the drafts of request 0 (position 60 of request 0)", "forward",
        "llama/modeling_llama.py",
    ),
    "dropped_window": Planted(
        "wrapper", "wrapper differs from model",
        "row 8 of the prompt of request 0 (position 8 of request 0)", "forward",
        "mistral/modeling_mistral.py",
    ),
    "freed_weight": Planted(
        "pointers", "freed memory", "points to memory that was freed", "scores"
    ),
    "grown_workspace": Planted(
        "warmup", "replaced buffer", "replaced `Broken.workspace`, float32 [0, 16]", "history_term"
    ),
    "lazy_mask": Planted(
        "warmup", "lazy cache", "created `Broken.masks[32]` (bool [32, 32]) from pad rows",
        "forward",
    ),
    "leaking_pad_row": Planted(
        "pads", "leaking pad row", "of next_token_logits (request 0 of", "forward",
        "broken/sound.py",
    ),
    "batch_maximum": Planted("pads", "leaking pad row", f"{FIRST_NODE}amax`", "history_term"),
    "running_sum": Planted(
        "pads", "rows depend on batch order", "first node that differs is `cumsum`", "history_term"
    ),
    "batch_size_branch": Planted(
        "shadow", "dependence on the batch size", "Only the padded step runs `", "history_term"
    ),
    "metadata_of_another_size": Planted(
        "pads", "metadata of another size",
        "It reads `Broken.mask` (float32 [1024]), which the forward made for another batch size",
        "history_term",
    ),
    "training_batch_norm": Planted(
        "pads", "leaking pad row", FIRST_NODE, "forward", "broken/sound.py"
    ),
    "undeclared_state": Planted(
        "warmup", "undeclared state", "rows of its requests in `Broken.pool`", "history_term",
        severity="warning",
    ),
    "unwritten_row": Planted(
        "pool-poison", "stale pool memory", "memory allocated by `new_empty` at broken/",
        "position_term",
    ),
    "stale_positions": Planted(
        "pointers", "dead input", "no node reads the input field `positions`", severity="warning"
    ),
    "written_input": Planted(
        "forward", "written input", "writes into the input field `positions`", "position_term"
    ),
    "active_dropout": Planted(
        "forward", "random draw", "draws random numbers outside of a sampler", "forward",
        "broken/sound.py", "note",
    ),
}  # fmt: skip
"""The first finding of all audits of each example. The file is the example's own if it is empty."""
UNDECLARED = Planted("pointers", "undeclared memory", "the target does not declare")
SPLIT_SUM = Planted("rows", "rounding depends on other rows", "among 2 requests", "<genexpr>")
OTHERS = [
    ("grown_workspace", UNDECLARED),
    ("lazy_mask", UNDECLARED),
    ("leaking_pad_row", Planted("shadow", "leaking pad row", FIRST_NODE)),
    ("split_sum", SPLIT_SUM),
]
"""Findings of further audits of an example."""

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
    is_alone = device == "cuda" or audit == "rows" or (name, audit) == ("leaking_pad_row", "shadow")
    return audited(name, device, *((audit,) if is_alone else ()))


@devices
def test_the_sound_model_has_no_finding_but_its_constants(device):
    report = audit_target(locate("tools.examples.broken.sound:target", device), device=device)
    # Other tests of this process use more streams.
    (finding,) = [each for each in report.findings if each.audit != "launch"]
    assert (finding.severity, finding.names) == ("note", ("sound.CONTEXT = 64",))
    assert {check.audit for check in report.checks} == set(USUAL_AUDITS)


@devices
@pytest.mark.parametrize(("name", "planted"), [*PLANTED.items(), *OTHERS])
def test_a_broken_model_is_found(name, planted, device):
    findings = audited_for(name, device, planted.audit)
    found = [finding for finding in findings if finding.kind == planted.kind]
    assert any(planted.text in finding.text for finding in found), found
    assert {finding.audit for finding in found} == {planted.audit}
    assert all(finding.advice for finding in found)
    if planted.function:
        file = planted.file or f"broken/{name}.py"
        sources = {each.source for each in findings if each.audit == planted.audit}
        assert any(
            source.startswith(file) and source.endswith(f"in {planted.function}")
            for source in sources
        ), sources


FIRST = {name: (planted.severity, planted.kind) for name, planted in PLANTED.items()}
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
    assert names == {"sound", "host_sync", *PLANTED, *dict(OTHERS)}


@pytest.mark.parametrize("path", sorted(BROKEN.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_states_its_error_and_effect(path):
    text = path.read_text()
    assert f"graphkit audit tools.examples.broken.{path.stem}:target" in text
    is_explained = "\nError: " in text and "\nEffect: " in text
    assert is_explained == (path.stem != "sound")
