"""The checking mode on CUDA: device values are checked inside the graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphkit as gk

pytestmark = pytest.mark.gpu
VOCAB = 32


def test_a_replay_reports_the_device_values_of_the_one_before():
    def forward(inputs):
        rows = inputs.input_ids + inputs.positions
        return gk.ForwardOutput(next_token_logits=rows[:, None].float().expand(-1, VOCAB).clone())

    runner = gk.DecodeRunner(
        forward,
        spec=gk.SpecConfig("NONE", 0, 1, 1),
        sizes=gk.BufferSizes(8, 64, 8, VOCAB, torch.float32),
        batch_sizes=[8],
        device="cuda",
        check=True,
    )
    runner.capture()

    def batch(ids):
        return gk.TargetVerifyInputs(
            req_pool_indices=np.arange(1, 4),
            seq_lens=np.arange(3, dtype=np.int32),
            input_ids=torch.tensor(ids, device="cuda"),
            positions=np.arange(3),
            out_cache_loc=np.arange(1, 4),
        )

    runner.replay(batch([1, 2, 3]))
    runner.replay(batch([1, VOCAB, 3]))
    torch.cuda.synchronize()
    with pytest.raises(gk.InputError, match=f"of an earlier replay contains {VOCAB}") as caught:
        runner.replay(batch([1, 2, 3]))
    assert caught.value.field == "input_ids"
    assert runner.replay(batch([1, 2, 3])).next_token_logits[:, 0].tolist() == [1, 3, 5]
    runner.close()
