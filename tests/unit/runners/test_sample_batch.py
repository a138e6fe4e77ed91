"""Sample batches are valid in every mode: the checking mode accepts them, and they replay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.runners import RUNNERS

STEPS, CONTEXT, VOCAB, HIDDEN = 3, 40, 50, 8
SIZES = gk.BufferSizes(5, CONTEXT, HIDDEN, VOCAB, torch.bfloat16, page_size=4, spec_hidden_size=24)
VERIFY, LAYERS = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.MULTI_LAYER_EAGLE
MODES = [mode for mode in RUNNERS if mode is not gk.ForwardMode.STEP]


def spec_of(topk, algorithm="EAGLE"):
    return gk.SpecConfig(algorithm, STEPS, topk, STEPS + 1 if topk == 1 else 8)


CASES = {
    **{f"{mode.value}-{topk}": (mode, spec_of(topk), {}) for mode in MODES for topk in (1, 2)},
    "front tokens": (LAYERS, spec_of(1), {"num_front_tokens": 2}),
    "standalone": (gk.ForwardMode.DRAFT, spec_of(2, "STANDALONE"), {}),
    "optional fields": (
        VERIFY, spec_of(1),
        {"optional_fields": ["mrope_positions", "input_embeds", "token_bitmask"]},
    ),
    "temperatures": (LAYERS, spec_of(1), {"optional_fields": ["temperatures"]}),
    "a chain with a mask": (VERIFY, spec_of(1), {"optional_fields": ["custom_mask"]}),
}  # fmt: skip


def forward(inputs):
    rows = torch.nn.functional.one_hot(inputs.input_ids, VOCAB).to(torch.bfloat16)
    is_draft = not isinstance(inputs, gk.TargetVerifyInputs)
    width = 24 if isinstance(inputs, gk.DraftExtendInputs) else HIDDEN
    return gk.ForwardOutput(
        next_token_logits=rows, hidden_states=rows[:, :width] if is_draft else None
    )


def draft_layer(inputs):
    rows = torch.nn.functional.one_hot(inputs.input_ids, VOCAB).to(torch.bfloat16)
    return gk.ForwardOutput(next_token_logits=rows, hidden_states=rows[:, :HIDDEN])


def make_runner(mode, spec, **options):
    one = draft_layer if mode not in (VERIFY, gk.ForwardMode.DECODE) else forward
    chain = [one] * STEPS if mode is LAYERS else one
    return RUNNERS[mode](chain, spec=spec, sizes=SIZES, device="cpu", check=True, **options)


@pytest.mark.parametrize("case", CASES)
def test_batches_of_every_mode_pass_all_checks(case):
    mode, spec, options = CASES[case]
    with make_runner(mode, spec, batch_sizes=[2, 5], **options) as runner:
        runner.capture()
        for requests in (1, 2, 5):
            batch = runner.sample_batch(requests, seed=requests)
            assert batch.batch_size == requests
            assert runner.can_replay(batch)
            output = runner.replay(batch)
            assert all(len(tensor) for tensor in output.tensors().values())
            slots = batch.out_cache_loc
            assert len({*slots.tolist()}) == len(slots)
            assert slots.min() >= SIZES.page_size
            assert len({*batch.req_pool_indices.tolist()}) == requests
            assert 1 <= batch.seq_lens.min() <= batch.seq_lens.max() <= CONTEXT
            assert runner.can_replay(runner.sample_batch(requests)), "the device found no violation"
            runner.replay(batch)


def same_numbers(one, other):
    return torch.equal(torch.as_tensor(one).double(), torch.as_tensor(other).double())


@pytest.mark.parametrize("case", CASES)
def test_batches_depend_on_the_seed_alone(case):
    mode, spec, options = CASES[case]
    runner = make_runner(mode, spec, **options)
    one, same, other = (vars(runner.sample_batch(4, seed)) for seed in (3, 3, 4))
    for name, value in one.items():
        if value is not None:
            assert same_numbers(value, same[name]), name
    names = ("seq_lens", "positions")
    assert not all(np.array_equal(one[name], other[name]) for name in names)


def test_the_masks_of_a_tree_are_trees():
    batch = make_runner(VERIFY, spec_of(2)).sample_batch(4)
    assert (batch.custom_mask == np.tril(batch.custom_mask)).all()
    depth = batch.custom_mask.sum(2) - 1
    assert (batch.positions.reshape(depth.shape) - depth == batch.seq_lens[:, None]).all()


@dataclass(kw_only=True, eq=False)
class OwnInputs(gk.StepInputs):
    """Fields of a step: one has a name of the library with another shape."""

    seq_lens: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.int32, "lengths", pad=1)
    adapter: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.int64, "which adapter", pad=7)
    positions: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.int64, "first and last", row=(2,))
    rows: gk.Rows = gk.declare(
        gk.Axis.TOKEN, gk.MODEL_DTYPE, "hidden states", row=("H",), by_address=True
    )


@dataclass(kw_only=True, eq=False)
class OwnOutput(gk.Output):
    """Sums."""

    sums: torch.Tensor = gk.declare_output(gk.Axis.TOKEN)


def test_a_step_with_declared_inputs_has_batches():
    runner = gk.StepRunner(
        lambda inputs: OwnOutput(sums=inputs.rows.sum(1)),
        inputs=OwnInputs, output=OwnOutput, sizes=SIZES, tokens_per_request=3, device="cpu",
        check=True,
    )  # fmt: skip
    runner.capture()
    batch = runner.sample_batch(2)
    assert batch.adapter.tolist() == [7, 7]
    assert batch.positions.shape == (2, 2)
    assert batch.rows.shape == (6, HIDDEN)
    assert runner.replay(batch).sums.shape == (6,)


def test_bound_fields_are_left_out():
    bound = {"seq_lens": torch.ones(5, dtype=torch.int32)}
    runner = make_runner(VERIFY, spec_of(1), bound_fields=bound)
    runner.capture()
    batch = runner.sample_batch(2)
    assert batch.seq_lens is None
    runner.replay(batch)


def attention_of(kv_slots):
    requests = gk.ReqToTokenPool(5, CONTEXT, "cpu")
    pool = gk.MHATokenToKVPool(kv_slots, 4, torch.bfloat16, 1, 8, 1, "cpu")
    return gk.SdpaAttention(requests, pool)


def test_slots_fit_the_pool_of_the_attention_backend():
    """Two pages of four slots per request, of which a step writes four."""
    runner = make_runner(VERIFY, spec_of(1), attention=attention_of(16))
    batch = runner.sample_batch(2)
    assert batch.out_cache_loc.max() < 16 + 4
    assert batch.seq_lens.max() <= 4
    runner = make_runner(VERIFY, spec_of(1), attention=attention_of(16))
    with pytest.raises(gk.ConfigError, match="no room for the 4 that a TARGET_VERIFY step writes"):
        runner.sample_batch(5)


@pytest.mark.parametrize("requests", [0, -1, 6, "2", None, True, 1.0])
def test_a_wrong_number_of_requests_is_refused(requests):
    with pytest.raises(gk.InputError, match="batch_size must be an int from 1 to 5, got"):
        make_runner(VERIFY, spec_of(1)).sample_batch(requests)


@pytest.mark.parametrize("seed", [-1, "0", None, 2**63])
def test_a_wrong_seed_is_refused(seed):
    with pytest.raises(gk.InputError, match="seed must be an int from 0 to"):
        make_runner(VERIFY, spec_of(1)).sample_batch(1, seed)
