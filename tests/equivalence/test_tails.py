"""Live batch sizes, staged batches, and what is behind the live rows, against the padded step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkit.audit.batch_variants import Requests

SIZES = 2, 8, 12, 16

"""One set for all tests, since captures take most of their time."""


@pytest.mark.slow
def test_poisoned_buffers_change_nothing(capture, assert_same):
    captured = capture(*SIZES)
    for live in (1, 5, 8, 9, 15, 16):
        batch = captured.batch(live, live)
        clean = captured.replay(batch)
        captured.poison()
        assert_same(clean, captured.replay(batch))


def test_the_tail_holds_pads_after_a_replay(capture):
    captured = capture(*SIZES)
    buffers = captured.runner.buffers
    captured.poison()
    batch = captured.batch(5, 0)
    captured.replay(batch, 16)
    view = buffers.view(16)
    for layout in buffers.layouts:
        rows = getattr(view, layout.name)
        live = layout.shape(captured.rows(layout.field.axis, batch))[layout.dim]
        tail = rows.narrow(layout.dim, live, rows.shape[layout.dim] - live)
        assert tail.numel()
        assert (tail == layout.pad).all(), layout.name


@pytest.mark.slow
def test_a_shrinking_sequence_leaves_no_stale_rows(capture):
    captured = capture(*SIZES)
    tensors = captured.runner.buffers.arena.tensors
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for turn, live in enumerate((16, 11, 3, 7, 1, 16, 1)):
        captured.assert_right(captured.batch(live, turn))
    assert addresses == {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_back_to_back_replays_do_not_wait_for_one_another(capture, assert_same):
    """More in flight than the mailbox has entries, each with another size.

    Batches read what earlier ones wrote to the KV pools, so that both sequences begin alike.
    """
    captured = capture(*SIZES)
    batches = [captured.batch(live, live) for live in (16, 1, 9, 8, 15, 2, 12, 5)]
    state = captured.target.mutable_state
    before = {name: tensor.clone() for name, tensor in state.items()}
    wanted = [captured.replay(batch) for batch in batches]
    for name, tensor in state.items():
        tensor.copy_(before[name])
    outputs = [captured.runner.replay(batch, clone=True) for batch in batches]
    for one, output in zip(wanted, outputs, strict=True):
        assert_same(one, output.tensors())


def test_nan_in_the_dummy_slot_does_not_reach_live_rows(capture, assert_same):
    captured = capture(*SIZES)
    batch = captured.batch(3, 1)
    clean = captured.replay(batch)
    for tensor in captured.target.mutable_state.values():
        tensor[0] = torch.nan
    again = captured.replay(batch)
    for tensor in captured.target.mutable_state.values():
        tensor[0] = 0
    assert_same(clean, again)


def test_a_replay_writes_its_own_slots_and_the_dummy_alone(capture, device):
    captured = capture(*SIZES)
    batch = captured.batch(2, 1)
    before = {name: tensor.clone() for name, tensor in captured.target.mutable_state.items()}
    for tensor in captured.target.mutable_state.values():
        tensor.add_(1)
    raised = {name: tensor.clone() for name, tensor in captured.target.mutable_state.items()}
    captured.replay(batch, 16)
    own = torch.as_tensor(batch.out_cache_loc, device=device)
    own = torch.cat([own, own.new_zeros(1)])
    changed = {
        int(slot)
        for name, tensor in captured.target.mutable_state.items()
        for slot in (tensor != raised[name]).flatten(1).any(1).nonzero()
    }
    for name, tensor in captured.target.mutable_state.items():
        tensor.copy_(before[name])
    assert changed
    assert changed <= set(own.tolist())


@pytest.mark.slow
def test_interleaved_modes_do_not_disturb_each_other(target, capture_mode):
    every = [capture_mode(mode, SIZES) for mode in target.forwards]
    for turn, live in enumerate((16, 3, 9, 1)):
        for captured in (*every, every[0]):
            captured.assert_right(captured.batch(live, turn))


def test_rows_do_not_depend_on_their_index(capture):
    captured = capture(*SIZES)
    batch, buffers = captured.batch(8, 4), captured.runner.buffers
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    reordered = Requests.from_batch(batch, buffers.layouts, buffers.capacity).take(order).batch()
    straight, moved = captured.replay(batch), captured.replay(reordered)
    for name, rows in straight.items():
        wanted = rows.unflatten(0, (8, -1))[order].flatten(0, 1)
        assert torch.equal(moved[name], wanted), name


@pytest.mark.slow
def test_every_live_size_runs_at_the_smallest_size_that_holds_it(capture):
    captured = capture()
    table = captured.runner.table
    for live in range(1, table.max_batch_size + 1):
        batch = captured.batch(live, live)
        assert captured.runner.can_replay(batch).padded_batch_size == table.fit(live)
        captured.poison()
        captured.assert_right(batch)
    assert captured.runner.stats.replays_by_size.keys() == set(table)


@pytest.mark.slow
def test_every_captured_size_takes_every_smaller_batch(capture):
    captured = capture()
    for size in (3, 7, 16):
        for live in range(1, size + 1):
            captured.poison()
            captured.assert_right(captured.batch(live, 100 + live), size)


@pytest.mark.slow
def test_the_empty_batch_gives_empty_rows(capture):
    captured = capture()
    batch, before = captured.batch(1, 0), captured.runner.stats.replays
    idle = type(batch)(**{name: rows[:0] for name, rows in vars(batch).items() if rows is not None})
    full, empty = captured.replay(batch), captured.replay(idle)
    assert {name: (0, *rows.shape[1:]) for name, rows in full.items()} == {
        name: tuple(rows.shape) for name, rows in empty.items()
    }
    assert captured.runner.stats.replays == before + 1


def fields(batch):
    return {name: rows for name, rows in vars(batch).items() if rows is not None}


@pytest.mark.slow
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


@pytest.mark.slow
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
