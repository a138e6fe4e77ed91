"""``pytest --graphkit`` and the fixture, in runs of pytest inside a test."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import graphkit as gk

ROOT = Path(__file__).resolve().parents[4]
RIGHT = "lambda rows: rows * 2"
LEAK = "lambda rows: rows + rows.mean(0)"
OURS = ("equivalence", "pads")


def ids(result):
    return [line.split(" ")[0] for line in result.outlines if line.startswith("models:target::")]


def test_there_is_a_test_per_mode_size_and_property(run_target):
    result = run_target(RIGHT, "-v", "-k", "equivalence or pads", modes=("TARGET_VERIFY", "DECODE"))
    assert result.ret == 0
    result.assert_outcomes(passed=8, deselected=result.parseoutcomes()["deselected"])
    assert sorted(ids(result)) == sorted(
        f"models:target::{mode}::{name}[{size}]"
        for mode in ("TARGET_VERIFY", "DECODE") for size in (1, 3) for name in OURS
    )  # fmt: skip


def test_every_audit_of_the_library_is_a_property(run_target):
    from graphkit.records.audit import USUAL_AUDITS

    result = run_target(RIGHT, "--collect-only", "-q")
    names = {each.rpartition("::")[2].partition("[")[0] for each in ids(result)}
    assert names == {*OURS, *USUAL_AUDITS} - {
        "loop",
        "misses",
        "wrapper",
    }  # those are about no captured size


MODEL = (
    "lambda ids: {scale} * (torch.nn.functional.embedding(ids, torch.eye(16))"
    " + torch.arange(ids.shape[1])[:, None] / 64)"
)


@pytest.mark.parametrize(("scale", "outcome"), [(2, "passed"), (3, "failed")])
def test_a_target_is_compared_with_the_model_that_it_declares(run_target, scale, outcome):
    slots = "torch.arange(4 * 32).view(4, 32) + 1"
    result = run_target(RIGHT, "-k", "wrapper", model=MODEL.format(scale=scale), kv_slots=slots)
    assert result.parseoutcomes()[outcome] == 1
    if outcome == "failed":
        result.stdout.fnmatch_lines(["*models:target wrapper*", "TARGET_VERIFY: row 0 of the pro*"])


def test_warnings_fail_no_test(run_target):
    """An audit warns of inputs that the small forward ignores."""
    result = run_target(RIGHT, "-k", "pointers")
    assert result.ret == 0
    assert result.parseoutcomes()["passed"] == 2


def test_a_planted_pad_leak_fails_with_its_cause(run_target):
    result = run_target(LEAK, "-k", "equivalence or pads")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes() | {"deselected": 0} == {
        "passed": 2, "failed": 2, "deselected": 0,
    }  # fmt: skip
    result.stdout.fnmatch_lines_random([
        "*models:target TARGET_VERIFY equivalence[[]3[]]*",
        "TARGET_VERIFY: the replay of 1 live request at captured size 3 is wrong: padding*",
        "  at fault: padding",
        "  probable bug: leaking pad row. *",
        "*models:target TARGET_VERIFY pads[[]3[]]*",
        "leaking pad row: TARGET_VERIFY 3: row 0 of next_token_logits (request 0 of 1) is *",
        "  expected: *",
        "  Compute every row from that row alone*",
        "FAILED models:target::TARGET_VERIFY::pads[[]3[]]*",
    ])  # fmt: skip
    assert "Traceback" not in result.stdout.str()
    assert "collection.py" not in result.stdout.str()


UNEVEN = "lambda rows: rows * (1 + 5e-5 * len(rows))"
"""Rounds by some 1000 ulp, of which 256 are allowed."""


@pytest.mark.parametrize(("tolerance", "failed"), [("1", 2), ("8", 0)])
def test_the_tolerance_is_that_of_the_audit(run_target, tolerance, failed):
    options = "-k", "(equivalence or shadow) and [3]", "--graphkit-tolerance", tolerance
    result = run_target(UNEVEN, *options)
    assert result.parseoutcomes().get("failed", 0) == failed
    assert result.parseoutcomes().get("passed", 0) == 2 - failed


def test_an_invalid_tolerance_is_an_error_of_collection(run_target):
    result = run_target(RIGHT, "--graphkit-tolerance", "0")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["tolerance must be a number above 0, and finite, got 0.0."])


def test_a_run_can_end_at_the_first_failure(run_target):
    result = run_target(LEAK, "-x", "-k", "[3] and (equivalence or pads)")
    assert result.parseoutcomes()["failed"] == 1
    assert "passed" not in result.parseoutcomes()


def test_modes_are_captured_when_wanted_and_once_and_are_closed(run_target, monkeypatch):
    made, plan = [], gk.CaptureTarget.runner

    def planned(self, *mode, **facts):
        made.append(plan(self, *mode, **facts))
        return made[-1]

    monkeypatch.setattr(gk.CaptureTarget, "runner", planned)
    modes = ("TARGET_VERIFY", "DECODE")
    result = run_target(RIGHT, "-k", "DECODE and (pads or equivalence)", modes=modes)
    assert result.parseoutcomes()["passed"] == 4
    assert [(runner.mode.name, runner.status) for runner in made] == [("DECODE", "closed")]
    made.clear()
    run_target(RIGHT, "--collect-only", modes=modes)
    assert made == []
    run_target(LEAK, "-x", "-k", "equivalence", modes=modes)
    assert [(runner.mode.name, runner.status) for runner in made] == [("TARGET_VERIFY", "closed")]


def test_a_forward_that_cannot_be_captured_is_an_error_of_each_test(run_target, monkeypatch):
    captures, capture = [], gk.DecodeRunner.capture
    monkeypatch.setattr(
        gk.TargetVerifyRunner,
        "capture",
        lambda self, **facts: captures.append(1) or capture(self, **facts),
    )
    result = run_target("lambda rows: rows * rows.max().item()", "-k", "equivalence")
    result.assert_outcomes(errors=2, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["*CaptureError: cannot capture TARGET_VERIFY at batch size 3*"])
    assert len(captures) == 1


def test_an_audit_that_fails_affects_no_other_test(run_target, monkeypatch):
    from graphkit.audit.kit import collection

    def refuse(*_):
        raise gk.InspectError("nothing to see")

    monkeypatch.setitem(collection._AUDITS, "pads", refuse)
    result = run_target(RIGHT, "-k", "equivalence or pads")
    assert result.parseoutcomes()["passed"] == result.parseoutcomes()["failed"] == 2
    result.stdout.fnmatch_lines(["nothing to see"])


def test_the_checking_mode_refuses_nothing_that_an_audit_feeds(run_pytest, pytester, monkeypatch):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    made = "from small_targets import llama_target\ntarget = llama_target(topk=1, max_batch_size=2)"
    pytester.makepyfile(drafts=made)  # with floating-point rows, which become NaN
    ours = ("--graphkit", "drafts:target", "--graphkit-device", "cpu")
    result = run_pytest(RIGHT, *ours, "-k", "DRAFT_EXTEND_V2 and pads")
    assert result.parseoutcomes().get("passed") == 2


def test_a_mode_that_stays_eager_is_skipped_with_the_reason(run_pytest, pytester):
    pytester.makepyfile(
        eager="""
        from graphkit import AttentionBackend
        from models import gk, target

        class Unwilling(AttentionBackend):
            def supports(self, mode):
                return False
            def init_state(self, sizes, max_tokens):
                pass
            def metadata(self, mode, inputs):
                return None

        import dataclasses
        mode = gk.ForwardMode.DRAFT_EXTEND_V2
        forward = next(iter(target.forwards.values()))
        eager = dataclasses.replace(target, forwards={mode: forward}, attention=Unwilling())
        """
    )
    result = run_pytest(RIGHT, "--graphkit", "eager:eager", "--graphkit-device", "cpu", "-rs")
    assert set(result.parseoutcomes()) == {"skipped"}
    result.stdout.fnmatch_lines(["SKIPPED*Unwilling does not support DRAFT_EXTEND_V2 graphs"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models:nothing", "TARGET 'models:nothing' was not found: *"),
        ("absent:target", "TARGET 'absent:target' cannot be imported: ModuleNotFoundError*"),
        ("models", "TARGET 'models' does not have the form package.module:attribute."),
    ],
)
def test_an_invalid_target_is_an_error_of_collection(run_pytest, text, said):
    result = run_pytest(RIGHT, "--graphkit", text)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([f"*ERROR collecting {text}*", said])
    assert "Traceback" not in result.stdout.str()


def test_a_missing_device_is_an_error_of_collection(run_pytest, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run_pytest(RIGHT, "--graphkit", "models:target", "--graphkit-device", "cuda")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*no CUDA device*"])


def test_other_tests_run_only_from_given_paths(run_target, pytester):
    pytester.makepyfile(test_other="def test_it(): pass")
    alone = run_target(RIGHT, "-k", "test_it or equivalence")
    assert alone.parseoutcomes()["passed"] == 2
    beside = run_target(RIGHT, "-k", "test_it or equivalence", "test_other.py")
    assert beside.parseoutcomes()["passed"] == 3


def test_the_fixture_takes_targets_and_runners(run_pytest, pytester):
    pytester.makepyfile(
        test_with_fixture="""
        from models import gk, target, target_of

        def test_target(replay_equivalence):
            replay_equivalence(target, device="cpu")

        def test_wrong_target(replay_equivalence):
            replay_equivalence(target_of(lambda rows: rows + rows.mean(0)), device="cpu")

        def test_runner(replay_equivalence):
            mode = gk.ForwardMode.TARGET_VERIFY
            with target.runner(mode, device="cpu") as runner:
                runner.capture()
                replay_equivalence(runner, [target.batch(mode, 2, 0)])
        """
    )
    result = run_pytest(RIGHT, "test_with_fixture.py")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["E*AssertionError: TARGET_VERIFY: the replay of 1 live request *"])


def test_a_run_without_options_is_not_affected(tmp_path):
    """The plugin is found by its entry point and does not import torch."""
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    points = facts["project"]["entry-points"]["pytest11"]
    assert import_module(points["graphkit"]).replay_equivalence
    installed = tmp_path / "site" / "graphkit_as_installed-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Name: graphkit-as-installed\nVersion: 1\n")
    lines = [f"{name} = {module}" for name, module in points.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]))
    (tmp_path / "test_plain.py").write_text(
        "import sys\n"
        "def test_plain(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.hasplugin('graphkit')\n"
        "    assert not {'torch', 'numpy', 'triton'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:hypothesispytest",
         "-p", "no:cacheprovider", "test_plain.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
