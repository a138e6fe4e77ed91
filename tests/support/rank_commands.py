"""Commands that torchrun starts on several ranks; see ``rank_processes``."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from graphkit.cli import main, output
from graphkit.distributed import Channel
from graphkit.models import reference_target
from graphkit.records import AuditReport, load_record
from graphkit.views.diff import diff_records

attempts = itertools.count()


def small_target(device, group, max_batch_size=1):
    """Return a target of the reference model that commands capture quickly."""
    return replace(
        reference_target(device, max_batch_size=max_batch_size, group=group), name="small"
    )


def uneven_target(device, group):
    """Return a target whose rank 1 has one operation more than rank 0."""
    target = small_target(device, group)
    (mode, verify), *_ = target.forwards.items()

    def forward(inputs):
        output = verify(inputs)
        if group.rank == 1:
            output.next_token_logits.add_(0)
        return output

    return replace(target, forwards={mode: forward}, engine=None)


def flawed_target(device, group):
    """Return a target whose rank 1 bakes a value, keeps a count, has NaN and mixes pads in."""
    target = small_target(device, group, max_batch_size=2)
    (mode, verify), *_ = target.forwards.items()
    host, counts, cache = {"scale": 1.0}, [], {}

    def forward(inputs):
        output = verify(inputs)
        if group.rank == 1:
            logits = output.next_token_logits
            counts.append(len(counts))
            cache.setdefault("columns", logits.shape[1])
            logits.mul_(host["scale"]).add_(logits.sum(0))
            logits[:1, :1].fill_(float("nan"))
        return output

    def set_scale(value):
        host["scale"] = value

    values = {"scale": (set_scale, [1.0, 0.5])}
    return replace(target, forwards={mode: forward}, host_values=values, engine=None)


def whole_target(device):
    """Return a target that runs on one rank."""
    return small_target(device, None)


@contextlib.contextmanager
def own_store():
    """Give a command a store of its own, which rank 0 serves until the command ends on all ranks.

    torchrun serves it in a process that outlives the ranks. If rank 0 closed it earlier, a slower
    rank would retry its connection until the time limit of the process group.
    """
    common, name = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])), f"{next(attempts)}"
    rank, ranks = int(os.environ["RANK"]), range(int(os.environ["WORLD_SIZE"]))
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common.set(name, str(store.port))
    with pytest.MonkeyPatch.context() as patch:
        # With it, ranks connect to this store. Without, rank 0 would open the port itself.
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        patch.setenv("MASTER_PORT", common.get(name).decode())
        try:
            yield
        finally:
            common.set(f"{name} ended on {rank}", "")
            common.wait([f"{name} ended on {each}" for each in ranks])


def run(*words):
    """Run a command on all ranks; return its exit code, its stdout and its stderr."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out, err = io.StringIO(), io.StringIO()
    with own_store(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_silent", False)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*words, "--device", device])
    return code, out.getvalue(), err.getvalue()


def run_commands():
    """Commands run on all ranks, rank 0 prints, and exit codes agree."""
    is_first, tp = os.environ["RANK"] == "0", ["--tp", os.environ["WORLD_SIZE"]]
    words = ["generate", "--prompt", "import os", "--max-new-tokens", "12", "--json"]
    code, text, _ = run(*words, *tp)
    assert code == 0
    assert (json.loads(text)["new_tokens"] == 12) if is_first else not text

    words = ["capture", "rank_commands:small_target", "--mode", "TARGET_VERIFY", "--mode", "STEP"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"  # a folder per rank, to see which file each one writes
        code, text, error = run(*words, "--out", str(out), *tp)
        written = [path.name for path in Path(folder).iterdir()]
    assert code == 0, error
    assert ("STEP" in text) == is_first
    assert written == ["out.json" if is_first else f"out.rank{os.environ['RANK']}.json"]

    words = ["bench", "--batch-sizes", "1", "--steps", "2", "--rounds", "1"]
    words += ["--steps-per-launch", "2", "--context", "8", "--json"]
    code, text, error = run(*words, *tp)
    assert code == 0, error
    assert bool(text) == is_first
    if is_first:
        assert json.loads(text)["settings"]["tensor parallel"] == tp[1]


run_commands.has_group = False


def refuse_commands():
    """Usage errors end all ranks with one code, and rank 0 alone names them."""
    is_first, tp = os.environ["RANK"] == "0", ["--tp", os.environ["WORLD_SIZE"]]
    for words, part in {
        ("capture",): "--tp is 1, but the command has",
        ("capture", "rank_commands:whole_target", *tp): "does not run on several ranks",
        ("generate", "--prompt", "x" * 3000, *tp): "a prompt has",
        ("generate", "--prompt", "x", "--one-shot"): "--tp is 1, but the command has",
        ("bench", "--one-shot", *tp): "one_shot needs ranks with CUDA devices and NCCL",
    }.items():
        code, text, error = run(*words)
        assert (code, text) == (2, ""), (words[0], code, text, error)
        if "--tp" in words:
            assert error.count("error: ") == is_first, error
        assert part in error or not is_first, error


refuse_commands.has_group = False


def refuse_ranks_whose_graphs_differ():
    """A node that only one rank has is named, and a diff of the ranks' records has it."""
    folder = Path(tempfile.gettempdir()) / f"graphkit-ranks-{os.environ['MASTER_PORT']}"
    folder.mkdir(exist_ok=True)
    words = ["capture", "rank_commands:uneven_target", "--out", str(folder / "out.json")]
    code, _, error = run(*words, "--tp", os.environ["WORLD_SIZE"])
    if os.environ["RANK"] == "0":
        first, second = (load_record(folder / name) for name in ("out.json", "out.rank1.json"))
        shutil.rmtree(folder)
        assert "rank 1: captured other graphs than rank 0: node" in error
        assert "of TARGET_VERIFY 1: aten::add_" in error
        (found,) = diff_records(first, second).graphs
        assert found.words == ("op add_ appeared in (forward): 1 node more",)
    assert code == 1, error


refuse_ranks_whose_graphs_differ.has_group = False


def name_the_rank_that_failed():
    """Rank 0 prints the error of rank 1, also if it first learns that rank 1 has left."""
    send = Channel._send

    def send_and_await_failure(self, tensor):
        send(self, tensor)
        if tensor.dtype == torch.uint8:
            self._group.wait_until(time.sleep)  # which ends when a rank has failed

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "0":
            patch.setattr(Channel, "_send", send_and_await_failure)
        refuse_ranks_whose_graphs_differ()


name_the_rank_that_failed.has_group = False


def audit_on_all_ranks():
    """Audits run in lockstep, also where only one rank finds a bug, and rank 0 prints it."""
    is_first, tp = os.environ["RANK"] == "0", ["--tp", os.environ["WORLD_SIZE"]]
    modes = ["--mode", "TARGET_VERIFY"]
    words = ["--only", "pointers,pool-poison,shadow,launch,loop", "--mode", "STEP", "--json"]
    code, text, error = run("audit", "rank_commands:small_target", *modes, *words, *tp)
    assert code == 0, (text, error)
    assert bool(text) == is_first
    if is_first:
        report = AuditReport.from_json(text)
        not_run = {(e.mode, e.audit) for e in report.checks if e.text.startswith("not checked: ")}
        assert {audit for mode, audit in not_run if mode == modes[1]} == {
            "pool-poison", "shadow", "launch",
        }  # fmt: skip
        assert ("STEP", "loop") in not_run

    words = ["--only", "warmup,frozen,finite,pads", "--batch-sizes", "2", "--json"]
    code, text, error = run("audit", "rank_commands:flawed_target", *modes, *words, *tp)
    assert code == 1, (text, error)
    if is_first:
        findings = AuditReport.from_json(text).findings
        assert {each.text.partition(": ")[0] for each in findings} == {"rank 1"}
        found = {each.kind for each in findings}
        assert found >= {"frozen value", "not finite output", "warm-up leak", "leaking pad row"}


audit_on_all_ranks.has_group = False


def measure_agreement():
    """The benchmark of agreements counts no wrong result, and rank 0 prints its report."""
    path = Path(__file__).parents[2] / "tools" / "bench" / "agreement.py"
    sys.path.append(str(path.parent))
    out = io.StringIO()
    with own_store(), contextlib.redirect_stdout(out):
        code = runpy.run_path(str(path))["main"](["--rounds", "1", "--steps", "30"])
    assert code == 0
    assert ("holds" in out.getvalue()) == (os.environ["RANK"] == "0")


measure_agreement.has_group = False
