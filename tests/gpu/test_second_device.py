"""A runner on a device that is not the current one."""

import pytest
import torch

import graphkit as gk
from graphkit.models.reference import reference_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device"),
]

VERIFY = gk.ForwardMode.TARGET_VERIFY


def test_a_runner_on_another_device_than_the_current_one():
    target = reference_target("cuda:1", max_batch_size=4)
    with target.runner(VERIFY, device="cuda:1", batch_sizes=[1, 4]) as runner:
        runner.capture()
        assert torch.cuda.current_device() == 0
        for requests in (1, 3, 4):
            batch = target.batch(VERIFY, requests, requests)
            replayed = runner.replay(batch, clone=True).next_token_logits
            assert replayed.device == torch.device("cuda", 1)
            assert torch.equal(runner.run_padded(batch).next_token_logits, replayed)
            eager = runner.fall_back(batch).next_token_logits
            torch.testing.assert_close(replayed, eager, rtol=3e-2, atol=3e-2)
        assert torch.cuda.current_device() == 0


def test_a_target_is_captured_on_another_device():
    record = gk.capture_target(reference_target("cuda:1", max_batch_size=2), device="cuda:1")
    assert record.mismatches == ()
