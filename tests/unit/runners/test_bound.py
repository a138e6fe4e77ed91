"""Fields that another graph writes in place: batches leave them out."""

from __future__ import annotations

import pytest
import torch

from graphkit import ConfigError, InputError, TargetVerifyInputs

PER_REQUEST = ("req_pool_indices", "seq_lens")
NAMES = (*PER_REQUEST, "input_ids", "positions", "out_cache_loc")


@pytest.fixture
def make_bound(make_runner, make_batch):
    """``make_bound(name)``: a captured runner, and ``refill(requests)``.

    The latter writes the storage as the other graph would, and gives the batch and the whole of it.
    """

    def make(name):
        source = torch.from_numpy(getattr(make_batch(4, seed=9), name))
        storage = torch.zeros_like(source)
        runner = make_runner(bound_fields={name: storage})
        runner.capture()

        def refill(requests):
            storage.copy_(source)
            rows = source[: requests * (1 if name in PER_REQUEST else 4)].numpy()
            whole = make_batch(requests, seed=requests, **{name: rows})
            return TargetVerifyInputs(**{**vars(whole), name: None}), whole

        return runner, refill

    return make


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["replay", "run", "fall_back"])
def test_every_way_reads_them_where_they_stand(
    make_bound, expect, assert_same, assert_in_step, name, way
):
    runner, refill = make_bound(name)
    for requests in (2, 3, 4, 1):
        batch, whole = refill(requests)
        assert_same(getattr(runner, way)(batch), expect(whole))
    assert_in_step(runner)


@pytest.mark.parametrize("name", NAMES)
def test_can_replay_does_not_miss_them(make_bound, name):
    runner, refill = make_bound(name)
    decision = runner.can_replay(refill(3)[0])
    assert (decision.ok, decision.padded_batch_size) == (True, 4)


@pytest.mark.parametrize("name", NAMES)
def test_staged_batches_have_no_rows_of_them(make_bound, expect, assert_same, name):
    runner, refill = make_bound(name)
    batch, whole = refill(2)
    staged = runner.stage(2)
    for other in set(NAMES) - {name}:
        getattr(staged, other)[:] = getattr(batch, other)
    with pytest.raises(InputError, match=f"field '{name}' was not captured"):
        getattr(staged, name)
    assert_same(staged.replay(), expect(whole))


@pytest.mark.parametrize("name", NAMES)
def test_other_rows_of_them_are_refused(make_bound, expect, assert_same, assert_in_step, name):
    """The runner would not read them."""
    runner, refill = make_bound(name)
    batch, whole = refill(3)
    for way in (runner.replay, runner.run, runner.fall_back):
        with pytest.raises(InputError, match=rf"'{name}' is bound.*Leave it out") as caught:
            way(whole)
        assert caught.value.field == name
    assert not runner.can_replay(whole)
    assert runner.stats.fallbacks == {}
    own = TargetVerifyInputs(**{**vars(batch), name: runner.buffers.live_rows(name, 3)})
    for way in (runner.replay, runner.run, runner.fall_back):
        assert_same(way(own), expect(whole))
    assert runner.can_replay(own)
    assert_in_step(runner)


@pytest.mark.parametrize("names", [PER_REQUEST, NAMES[2:]], ids=["requests", "tokens"])
def test_all_rows_of_an_axis_may_be_bound(make_runner, make_batch, expect, assert_same, names):
    """Storage per request then says how many requests there are."""
    whole = make_batch(4, seed=9)
    storage = {name: torch.from_numpy(getattr(whole, name).copy()) for name in names}
    runner = make_runner(bound_fields=storage)
    runner.capture()
    rows = dict.fromkeys(names) | {
        name: storage[name] for name in ("req_pool_indices",) if name in storage
    }
    batch = TargetVerifyInputs(**{**vars(whole), **rows})
    for way in (runner.replay, runner.run, runner.fall_back):
        for name, tensor in storage.items():
            tensor.copy_(torch.from_numpy(getattr(whole, name)))
        assert_same(way(batch), expect(whole))
    assert runner.can_replay(batch)
    assert runner.stats.fallbacks == {}


def test_a_misfit_is_refused(make_runner):
    with pytest.raises(ConfigError, match=r"bound_fields\['positions'\]"):
        make_runner(bound_fields={"positions": torch.zeros(3)})
