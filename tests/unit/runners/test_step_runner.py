"""``StepRunner``: a step that declares its own inputs and outputs, with everything a mode has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import graphkit as gk
from graphkit.audit import audit_target
from graphkit.testing import assert_replay_equivalent, batches

HIDDEN, VOCAB, HEADS = 8, 32, 3


@dataclass(kw_only=True, eq=False)
class HeadInputs(gk.StepInputs):
    """Hidden states, and a scale that pads with 1."""

    hidden_states: gk.Rows = gk.declare(
        gk.Axis.REQUEST, gk.MODEL_DTYPE, "last hidden state", row=("H",), by_address=True
    )
    scale: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.float32, "temperature", pad=1)


@dataclass(kw_only=True, eq=False)
class HeadOutput(gk.Output):
    """Candidates of each head."""

    logits: torch.Tensor = gk.declare_output(gk.Axis.REQUEST, row=(HEADS, "V"))
    best: torch.Tensor = gk.declare_output(gk.Axis.REQUEST, torch.int64, row=(HEADS,))


class Heads(torch.nn.Module):
    """One matrix per head; whole numbers, so that every kernel gives the same bits."""

    def __init__(self, counts=True):
        super().__init__()
        weight = torch.randint(-4, 5, (HEADS, HIDDEN, VOCAB), generator=torch.Generator())
        self.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
        self.calls, self.counts = 0, counts

    def forward(self, inputs):
        self.calls += self.counts
        logits = torch.einsum("bh,nhv->bnv", inputs.hidden_states, self.weight)
        logits = logits / inputs.scale[:, None, None]
        return HeadOutput(logits=logits, best=logits.argmax(-1))


SIZES = gk.BufferSizes(4, 64, HIDDEN, VOCAB, torch.float32)


def batch_of(requests, seed=0):
    random = np.random.default_rng(seed)
    return HeadInputs(
        hidden_states=torch.from_numpy(random.integers(-4, 5, (requests, HIDDEN))).float(),
        scale=random.choice([0.5, 1.0, 2.0], requests).astype(np.float32),
    )


@pytest.fixture
def heads():
    return Heads()


@pytest.fixture
def runner(heads):
    with gk.StepRunner(
        heads, inputs=HeadInputs, output=HeadOutput, sizes=SIZES, batch_sizes=[2, 4], device="cpu"
    ) as runner:
        runner.capture()
        yield runner


def target_of(forward):
    return gk.CaptureTarget(
        name="heads",
        spec=gk.SpecConfig("NONE", 0, 1, 1),
        sizes=SIZES,
        forwards={gk.ForwardMode.STEP: forward},
        sample_batch=lambda _mode, batch_size, seed: batch_of(batch_size, seed),
        inputs_type=HeadInputs,
        output_type=HeadOutput,
        batch_sizes=[2, 4],
        weights=forward if isinstance(forward, torch.nn.Module) else None,
    )


def expected(heads, batch):
    made = heads(HeadInputs(hidden_states=batch.hidden_states, scale=torch.tensor(batch.scale)))
    heads.calls -= heads.counts
    return made


@pytest.mark.parametrize("requests", [1, 2, 3, 4])
def test_every_way_of_running_a_batch(runner, heads, requests):
    calls, batch = heads.calls, batch_of(requests, requests)
    wanted = expected(heads, batch)
    staged = runner.stage(requests)
    staged.scale[:] = batch.scale
    staged.hidden_states = batch.hidden_states
    for output in (staged.replay(clone=True), runner.replay(batch, clone=True)):
        assert torch.equal(output.logits, wanted.logits)
        assert torch.equal(output.best, wanted.best)
    assert heads.calls == calls, "a replay runs no Python"
    assert torch.equal(runner.run_padded(batch).best, wanted.best)
    assert torch.equal(runner.fall_back(batch).best, wanted.best)
    assert torch.equal(runner.run(batch).best, wanted.best)
    assert runner.stats.replays == 3


def test_pads_are_those_of_the_declaration(runner):
    runner.replay(batch_of(3))
    view = runner.buffers.view(4)
    assert view.scale[3] == 1
    assert not view.hidden_states[3].any()


def test_an_idle_batch_has_no_rows(heads, runner):
    planned = gk.StepRunner(heads, inputs=HeadInputs, output=HeadOutput, sizes=SIZES, device="cpu")
    for idle in (runner.replay(batch_of(0)), planned.run(batch_of(0))):
        assert idle.logits.shape == (0, HEADS, VOCAB)
        assert (idle.best.shape, idle.best.dtype) == ((0, HEADS), torch.int64)


def test_inspect_names_the_declared_fields(runner, heads):
    record = runner.inspect(2, weights=heads)
    names = {p.name for node in record.nodes for a in node.arguments for p in a.pointers}
    assert {"hidden_states", "scale", "weight"} <= names
    assert (record.mode, record.batch_size) == ("STEP", 2)


def test_the_command_captures_and_audits_it():
    heads = Heads(counts=False)  # a counter on the host is an error of its own
    record = gk.capture_target(target_of(heads), device="cpu")
    assert [mode.mode for mode in record.modes] == ["STEP"]
    assert record.mismatches == ()
    findings = audit_target(target_of(heads), device="cpu").findings
    assert not [finding for finding in findings if finding.severity == "error"]


def test_audits_find_a_value_that_the_graph_freezes():
    """A scale read on the host when the graph is captured."""
    model, host = Heads(counts=False), {"scale": 1.0}

    def forward(inputs: HeadInputs) -> HeadOutput:
        logits = model(inputs).logits * host["scale"]
        return HeadOutput(logits=logits, best=logits.argmax(-1))

    target = target_of(forward)
    values: dict[str, Any] = {"scale": (lambda value: host.update(scale=value), [1.0, 2.0])}
    object.__setattr__(target, "host_values", values)
    found = [f for f in audit_target(target, device="cpu").findings if "scale" in f.text]
    assert found


def test_the_kit_takes_drawn_batches(runner):
    drawn = batches(gk.ForwardMode.STEP, runner.spec, SIZES, inputs=HeadInputs, output=HeadOutput)

    @settings(max_examples=10, suppress_health_check=list(HealthCheck), deadline=None)
    @given(st.data())
    def check(data):
        assert_replay_equivalent(runner, [data.draw(drawn)])

    check()


@dataclass(kw_only=True, eq=False)
class RowInputs(gk.StepInputs):
    """Fields per token beside one per request."""

    seq_lens: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.int32, "tokens", pad=gk.Pad.SEQ_LEN)
    input_ids: gk.Rows = gk.declare(gk.Axis.TOKEN, torch.int64, "token ids")
    mask: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.bool, "mask", row=("W", "W"), optional=True)


@dataclass(kw_only=True, eq=False)
class RowOutput(gk.Output):
    """A row per token."""

    ids: torch.Tensor = gk.declare_output(gk.Axis.TOKEN, torch.int64)


def test_fields_per_token_have_the_declared_width():
    def forward(inputs):
        lens = inputs.seq_lens.repeat_interleave(inputs.tokens_per_request)
        return RowOutput(ids=inputs.input_ids + lens)

    runner = gk.StepRunner(
        forward, inputs=RowInputs, output=RowOutput, sizes=SIZES, tokens_per_request=3,
        batch_sizes=[4], device="cpu", optional_fields=["mask"],
    )  # fmt: skip
    runner.capture()
    batch = RowInputs(
        seq_lens=np.array([5, 7], np.int32), input_ids=np.arange(6), mask=np.ones((2, 3, 3), bool)
    )
    assert runner.replay(batch).ids.flatten().tolist() == [5, 6, 7, 10, 11, 12]
    with pytest.raises(gk.InputError, match="'input_ids' has shape"):
        runner.replay(RowInputs(seq_lens=batch.seq_lens, input_ids=np.arange(4), mask=batch.mask))


@dataclass(kw_only=True, eq=False)
class TokensAlone(gk.StepInputs):
    """No field per request."""

    input_ids: gk.Rows = gk.declare(gk.Axis.TOKEN, torch.int64, "token ids")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"inputs": dict}, "inputs must be a subclass of graphkit.StepInputs"),
        ({"inputs": None}, "inputs must be a subclass"),
        ({"output": torch.Tensor}, "output must be a subclass of graphkit.Output"),
        ({"inputs": TokensAlone}, "TokensAlone declares no field per request"),
        ({"tokens_per_request": 0}, "tokens_per_request must be an int >= 1"),
    ],
)
def test_wrong_declarations_are_refused(heads, arguments, text):
    given = {"inputs": HeadInputs, "output": HeadOutput, "sizes": SIZES, "device": "cpu"}
    with pytest.raises(gk.ConfigError, match=text):
        gk.StepRunner(heads, **{**given, **arguments})


def test_another_output_is_refused_by_name(heads):
    runner = gk.StepRunner(
        lambda inputs: heads(inputs).logits,
        inputs=HeadInputs, output=HeadOutput, sizes=SIZES, device="cpu",
    )  # fmt: skip
    with pytest.raises(gk.OutputError, match=r"returned a Tensor\. Return HeadOutput"):
        runner.fall_back(batch_of(2))


@pytest.mark.parametrize("letter", ["X", "v", "M"])
def test_an_unknown_letter_of_an_output_is_refused(letter):
    @dataclass(kw_only=True, eq=False)
    class Lettered(gk.Output):
        rows: torch.Tensor = gk.declare_output(gk.Axis.REQUEST, row=(letter,))

    with pytest.raises(gk.ConfigError, match=f"'rows' declares a row of '{letter}'") as caught:
        gk.StepRunner(print, inputs=RowInputs, output=Lettered, sizes=SIZES, device="cpu")
    assert caught.value.field == "rows"


def test_declared_rows_and_dtypes_are_checked():
    def forward(inputs):
        return RowOutput(ids=inputs.input_ids.int())

    runner = gk.StepRunner(
        forward, inputs=RowInputs, output=RowOutput, sizes=SIZES, tokens_per_request=3,
        batch_sizes=[4], device="cpu",
    )  # fmt: skip
    with pytest.raises(
        gk.CaptureError, match=r"ids as \[12\] torch.int32, expected \[12\] torch.i"
    ):
        runner.capture()
