"""Any value of a setting is taken, or refused by a GraphkitError that names the setting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

import graphkit as gk
from declared_modes import MODES
from graphkit.runners import RUNNERS
from graphkit.spec import CustomSpecAlgorithm, ForwardMode, SpecAlgorithm

ODD = st.sampled_from([
    None, True, False, "", "3", 3.0, float("nan"), -1, 2**63, 10**30, [], (), {}, object(), int,
    b"EAGLE", torch.float32, torch.tensor(3), torch.zeros(2),
])  # fmt: skip
SMALL = st.integers(-2, 12)


class Impossible(CustomSpecAlgorithm):
    """Answers what no runner can use."""

    def get_num_tokens_per_bs_for_target_verify(self, num_draft_tokens, is_draft_worker):
        return num_draft_tokens - 2


@st.composite
def spoilt(draw, **valid):
    """Settings that are valid but for one at most."""
    settings = {name: draw(value) for name, value in valid.items()}
    for name in draw(st.lists(st.sampled_from(sorted(valid)), max_size=1)):
        settings[name] = draw(ODD | SMALL | valid[name])
    return settings


@st.composite
def specs(draw):
    steps, topk = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    most = 1 + topk + max(steps - 1, 0) * topk * topk if steps else 1
    names = [*SpecAlgorithm, *SpecAlgorithm.__members__, "eagle", "?", Impossible("impossible")]
    return draw(
        spoilt(
            algorithm=st.sampled_from(["EAGLE", *names]),
            num_steps=st.just(steps),
            topk=st.just(topk),
            num_draft_tokens=st.just(steps + 1) if topk == 1 else st.integers(1, most),
            page_size=st.integers(1, 4),
            is_draft_worker=st.booleans(),
            linear_attention=st.booleans(),
        )
    )


SPECS = specs()
SIZES = spoilt(
    max_batch_size=st.integers(1, 9),
    max_context_len=st.integers(1, 99),
    hidden_size=st.integers(1, 9),
    vocab_size=st.integers(1, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    page_size=st.integers(1, 4),
    spec_hidden_size=st.none() | st.integers(1, 9),
)
RUNNER = spoilt(
    batch_sizes=st.none() | st.just([1]),
    multiple_of=st.integers(1, 3),
    optional_fields=st.none() | st.just([]),
    device=st.just("cpu"),
    bound_fields=st.none()
    | st.dictionaries(st.sampled_from(["seq_lens", "?", 3]), ODD, max_size=1),
    inputs_type=st.none(),
)


def made(kind, settings):
    """What the settings make, ``None`` if they are refused as a caller's mistake."""
    try:
        return kind(**settings)
    except gk.GraphkitError:
        return None


def test_any_spec_is_taken_or_refused(many):
    taken = []

    @many(300)
    @given(SPECS)
    def check(settings):
        spec = made(gk.SpecConfig, settings)
        if spec is None:
            return
        taken.append(spec)
        assert spec.plan().generation == "v3"
        assert spec.plan("a refusal").generation == "v2"
        for mode in ForwardMode:
            width = made(spec.tokens_per_request, {"mode": mode})
            assert width is None or width >= 1
        assert hash(spec) == hash(spec)
        assert repr(spec)

    check()
    assert len(taken) > 20


@pytest.mark.slow
def test_any_runner_is_planned_or_refused(many):
    planned = []

    @many(250)
    @given(SPECS, SIZES, RUNNER, st.sampled_from(MODES))
    def check(settings, sizes, options, mode):
        spec, sizes = made(gk.SpecConfig, settings), made(gk.BufferSizes, sizes)
        if spec is None or sizes is None:
            return
        forward = [print] * spec.num_steps if mode is ForwardMode.MULTI_LAYER_EAGLE else print
        facts = {"spec": spec, "sizes": sizes, "forward": forward, "device": "cpu", **options}
        runner = made(RUNNERS[mode], facts)
        if runner is not None:
            planned.append(runner.mode)
            assert max(runner.table) >= sizes.max_batch_size
            runner.close()

    check()
    assert {*planned} == {*MODES}


@pytest.mark.parametrize(
    "spoilt",
    [
        {"device": None}, {"device": 2**63}, {"device": b""}, {"optional_fields": True},
        {"optional_fields": "custom_mask"}, {"bound_fields": True},
        {"bound_fields": {"seq_lens": None}},
        {"inputs_type": True}, {"inputs_type": gk.DraftInputs}, {"multiple_of": 2**31},
    ],
    ids=str,
)  # fmt: skip
def test_what_fuzzing_found_is_refused(spoilt):
    spec = gk.SpecConfig("EAGLE", 3, 1, 4)
    sizes = gk.BufferSizes(2, 9, 4, 8, torch.float32)
    (name,) = spoilt
    with pytest.raises(gk.ConfigError, match=name):
        gk.TargetVerifyRunner(print, spec=spec, sizes=sizes, **{"device": "cpu", **spoilt})


@pytest.mark.parametrize("name", ["is_draft_worker", "linear_attention"])
@pytest.mark.parametrize("value", [None, 0, "no", []], ids=str)
def test_a_text_is_no_yes(name, value):
    with pytest.raises(gk.ConfigError, match=f"SpecConfig.{name} must be True or False"):
        gk.SpecConfig("EAGLE", 3, 1, 4, **{name: value})
