"""Staged batches and other sources of fields give the same rows."""

import numpy as np
import torch


def fields(batch):
    return {name: rows for name, rows in vars(batch).items() if rows is not None}


def test_staged_equals_replay(capture, assert_same):
    captured = capture(8, 16)
    for live in (3, 8, 13, 1):
        batch = captured.batch(live, live)
        wanted = captured.replay(batch)
        staged = captured.runner.stage(live, batch.num_tokens)
        for name, rows in fields(batch).items():
            if isinstance(rows, torch.Tensor):
                setattr(staged, name, rows)
            else:
                getattr(staged, name)[:] = rows
        assert_same(wanted, staged.replay().tensors())


def test_the_last_assignment_of_a_field_counts(capture, device, assert_same):
    """An array after a device tensor: the graph reads the entry again, not the address."""
    captured = capture(8)
    batch = captured.batch(5, 1)
    wanted = captured.replay(batch)
    staged = captured.runner.stage(5, batch.num_tokens)
    for name, rows in fields(batch).items():
        setattr(staged, name, torch.zeros_like(torch.as_tensor(rows)).to(device))
    for name, rows in fields(batch).items():
        setattr(staged, name, rows)
    assert_same(wanted, staged.replay().tensors())


def test_numpy_cpu_and_device_tensors_give_the_same_rows(capture, device, assert_same):
    captured = capture(8, 16)
    batch = captured.batch(5, 0)
    wanted = captured.replay(batch)
    as_cpu = {name: torch.as_tensor(rows).cpu() for name, rows in fields(batch).items()}
    as_device = {name: torch.as_tensor(rows).to(device) for name, rows in fields(batch).items()}
    mixed = {**as_cpu, "positions": as_device["positions"], "seq_lens": batch.seq_lens}
    for given in (as_cpu, as_device, mixed, fields(batch)):
        assert_same(wanted, captured.replay(type(batch)(**given)))


def test_host_values_are_cast_when_that_loses_nothing(capture, assert_same):
    captured = capture(8, 16)
    batch = captured.batch(5, 0)
    wanted = captured.replay(batch)
    batch.seq_lens = batch.seq_lens.astype(np.int64)
    batch.positions = batch.positions.astype(np.int32)
    assert_same(wanted, captured.replay(batch))
