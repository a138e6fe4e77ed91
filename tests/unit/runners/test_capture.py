"""What a capture records, and that neither it nor its failure leaves a trace."""

from __future__ import annotations

import pytest
import torch

from graphkit import CaptureCause, CaptureError, RecorderBackend, ReplayError


def test_the_record_of_a_capture(make_runner, model):
    sizes = []
    record = make_runner().capture(progress=sizes.append)
    assert (record.target, record.backend) == ("Model", "recorder")
    (mode,) = record.modes
    assert (mode.mode, mode.tokens_per_request, mode.host_planned) == ("TARGET_VERIFY", 4, False)
    assert [(s.batch_size, s.num_tokens) for s in mode.sizes] == [(1, 4), (2, 8), (4, 16)]
    assert list(mode.sizes) == sizes[::-1]
    assert all(s.num_nodes > 3 and s.capture_ms > 0 for s in mode.sizes)
    assert model.calls == 2 * len(mode.sizes)


def fail_at_two(inputs, how):
    if inputs.batch_size == 2:
        if how == "raise":
            raise RuntimeError("no weights")
        if how == "item":
            inputs.seq_lens.sum().item()
        if how == "nonzero":
            inputs.seq_lens.nonzero()


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", CaptureCause.FORWARD_ERROR),
        ("item", CaptureCause.HOST_SYNCHRONISATION),
        ("nonzero", CaptureCause.DATA_DEPENDENT_SHAPE),
    ],
)
def test_a_failed_capture_leaves_no_trace(
    make_runner, make_batch, model, expect, assert_same, assert_in_step, how, cause
):
    steps, repaired = torch.zeros(1), []

    def forward(inputs):
        steps.add_(torch.rand(1) + 1)
        if not repaired:
            fail_at_two(inputs, how)
        return model(inputs)

    runner, batch, done = make_runner(forward, mutable_state={"steps": steps}), make_batch(2), []
    random_state = torch.random.get_rng_state()
    with pytest.raises(CaptureError, match="TARGET_VERIFY at batch size 2") as caught:
        runner.capture(progress=done.append)
    assert (caught.value.mode, caught.value.batch_size) == ("TARGET_VERIFY", 2)
    assert caught.value.cause is cause
    assert [size.batch_size for size in done] == [4]
    assert runner.status == "planned"
    assert steps.item() == 0
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert_in_step(runner)
    with pytest.raises(ReplayError, match="planned"):
        runner.replay(batch)

    repaired.append(True)
    runner.capture()
    assert steps.item() == 0
    assert torch.equal(torch.random.get_rng_state(), random_state)
    for requests in (1, 2, 3, 4):
        batch = make_batch(requests, seed=requests)
        assert_same(runner.replay(batch), expect(batch))
    assert steps.item() > 4
    assert_in_step(runner)


def test_a_callers_own_error_leaves_no_trace_either(make_runner, assert_in_step):
    runner = make_runner()
    with pytest.raises(ZeroDivisionError):
        runner.capture(progress=lambda size: 1 / 0)
    assert runner.status == "planned"
    assert_in_step(runner)
    runner.capture()


def test_sizes_captured_before_the_failure_are_closed_again(make_runner, model):
    class Watched(RecorderBackend):
        made = []  # noqa: RUF012

        def capture(self, function, attribution=None):
            self.made.append(super().capture(function, attribution))
            return self.made[-1]

    def forward(inputs):
        fail_at_two(inputs, "raise")
        return model(inputs)

    with pytest.raises(CaptureError, match="no weights"):
        make_runner(forward, backend=Watched()).capture()
    assert [graph.ops for graph in Watched.made] == [()]
