"""What stood in the buffers before must not matter to live rows."""

import torch

from graphkit.spec import ForwardMode

VERIFY = ForwardMode.TARGET_VERIFY


def test_poisoned_buffers_change_nothing(verify, target, poison):
    runner = verify([8, 32])
    for live in (1, 5, 8, 9, 31, 32):
        batch = target.sample_batch(VERIFY, live, live)
        clean = runner.replay(batch, clone=True)
        poison(runner)
        again = runner.replay(batch)
        for name, rows in clean.tensors().items():
            assert torch.equal(rows, again.tensors()[name]), (live, name)


def test_the_tail_holds_pads_after_a_replay(verify, target, poison):
    runner = verify([32])
    poison(runner)
    runner.replay(target.sample_batch(VERIFY, 5, 0))
    view = runner.buffers.view(32)
    for layout in runner.buffers.layouts:
        live = runner.buffers.capacity.rows(layout.field.axis, 5)
        tail = getattr(view, layout.name).narrow(layout.dim, live, layout.capacity - live)
        assert (tail == layout.pad).all(), layout.name


def test_a_shrinking_sequence_leaves_no_stale_rows(verify, target, assert_right):
    runner = verify()
    addresses = {name: t.data_ptr() for name, t in runner.buffers.arena.tensors.items()}
    for turn, live in enumerate((32, 12, 3, 7, 1, 32, 1)):
        batch = target.sample_batch(VERIFY, live, turn)
        assert_right(runner, batch, runner.replay(batch))
    assert addresses == {n: t.data_ptr() for n, t in runner.buffers.arena.tensors.items()}


def test_nan_in_the_dummy_slot_does_not_reach_live_rows(verify, target):
    runner = verify([8])
    batch = target.sample_batch(VERIFY, 3, 1)
    clean = runner.replay(batch, clone=True)
    for tensor in target.state.values():
        tensor[0] = torch.nan
    again = runner.replay(batch, clone=True)
    for tensor in target.state.values():
        tensor[0] = 0
    assert torch.equal(clean.next_token_logits, again.next_token_logits)


def test_pad_rows_write_the_dummy_slot_alone(verify, target):
    runner = verify([32])
    batch = target.sample_batch(VERIFY, 2, 1)
    before = {name: tensor.clone() for name, tensor in target.state.items()}
    runner.replay(batch)
    own = torch.as_tensor(batch.out_cache_loc).to(next(iter(before.values())).device)
    for name, tensor in target.state.items():
        changed = (tensor != before[name]).flatten(1).any(1).nonzero().flatten()
        assert torch.isin(changed, torch.cat([own, own.new_zeros(1)])).all(), name


def test_interleaved_runners_do_not_disturb_each_other(verify, target, assert_right):
    first, second = verify([4, 32]), verify([8, 32])
    decode = verify([32], ForwardMode.DECODE)
    for turn, live in enumerate((32, 3, 17, 1)):
        for runner in (first, second, decode, first):
            batch = target.sample_batch(runner.mode, live, turn)
            assert_right(runner, batch, runner.replay(batch))


def test_rows_do_not_depend_on_their_place(verify, target):
    runner = verify([8])
    batch = target.sample_batch(VERIFY, 8, 4)
    width = runner.tokens_per_request
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    rows = [request * width + i for request in order for i in range(width)]
    moved = type(batch)(
        req_pool_indices=batch.req_pool_indices[order],
        seq_lens=batch.seq_lens[order],
        input_ids=batch.input_ids[rows],
        positions=batch.positions[rows],
        out_cache_loc=batch.out_cache_loc[rows],
        custom_mask=None if batch.custom_mask is None else batch.custom_mask[order],
    )
    straight = runner.replay(batch, clone=True).next_token_logits
    permuted = runner.replay(moved).next_token_logits
    torch.testing.assert_close(permuted, straight[rows], rtol=1e-5, atol=1e-5)
