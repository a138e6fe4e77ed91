"""The scheduler's own way of handing over a batch gives the same rows."""

import numpy as np
import torch

from graphkit.spec import ForwardMode

VERIFY = ForwardMode.TARGET_VERIFY


def test_staged_equals_replay(verify, target):
    runner = verify([8, 32])
    for live in (3, 8, 20, 1):
        batch = target.sample_batch(VERIFY, live, live)
        wanted = runner.replay(batch, clone=True)
        staged = runner.stage(batch_size=live)
        for layout in runner.buffers.layouts:
            getattr(staged, layout.name)[:] = getattr(batch, layout.name)
        output = staged.replay()
        for name, rows in wanted.tensors().items():
            assert torch.equal(rows, output.tensors()[name]), name


def test_numpy_cpu_and_device_tensors_give_the_same_rows(verify, target, device):
    runner = verify([8])
    batch = target.sample_batch(VERIFY, 5, 0)
    fields = {name: rows for name, rows in vars(batch).items() if rows is not None}
    wanted = runner.replay(batch, clone=True).next_token_logits
    as_cpu = {name: torch.as_tensor(rows) for name, rows in fields.items()}
    as_device = {name: torch.as_tensor(rows).to(device) for name, rows in fields.items()}
    mixed = {**as_cpu, "positions": as_device["positions"], "seq_lens": fields["seq_lens"]}
    for way in (as_cpu, as_device, mixed, fields):
        assert torch.equal(wanted, runner.replay(type(batch)(**way)).next_token_logits)


def test_host_values_are_cast_when_that_loses_nothing(verify, target):
    runner = verify([8])
    batch = target.sample_batch(VERIFY, 5, 0)
    wanted = runner.replay(batch, clone=True).next_token_logits
    batch.seq_lens = batch.seq_lens.astype(np.int64)
    batch.positions = batch.positions.astype(np.float64)
    assert torch.equal(wanted, runner.replay(batch).next_token_logits)
