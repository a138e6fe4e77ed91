"""Wrong arguments raise errors of graphkit that say what was expected."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest
import torch

from graphkit import (
    ConfigError,
    DraftExtendInputs,
    InputError,
    MultiLayerEagleRunner,
    Runner,
    SizeError,
    TargetVerifyInputs,
    TargetVerifyRunner,
)
from graphkit.runners import RUNNERS, RunnerOptions, StepRunner

COUNTS = [(None,), ("2",), ([2],), (1.5,), (1, "4"), (1, [4]), (1, 4.0)]

NO_BATCH = [None, {"input_ids": [1]}, [1, 2], torch.zeros(3), 5, TargetVerifyInputs]


@pytest.mark.parametrize("value", NO_BATCH, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("verb", ["replay", "run", "fall_back", "run_padded", "can_replay"])
def test_a_value_that_is_no_batch(runner, make_runner, value, verb, assert_in_step):
    for each in (runner, make_runner()):
        if each.status == "planned" and verb == "replay":
            continue
        if verb == "can_replay":
            assert "a batch must be a graphkit.TargetVerifyInputs" in each.can_replay(value).reason
            continue
        with pytest.raises(InputError, match=r"must be a graphkit\.TargetVerifyInputs, got a "):
            getattr(each, verb)(value)
    assert_in_step(runner)


@pytest.mark.parametrize("verb", ["replay", "run", "fall_back", "run_padded", "can_replay"])
def test_a_batch_of_another_mode_is_refused(runner, make_batch, verb, assert_in_step):
    batch = make_batch(2, cls=DraftExtendInputs)
    if verb == "can_replay":
        assert "TargetVerifyInputs, got a DraftExtendInputs" in runner.can_replay(batch).reason
    else:
        with pytest.raises(InputError, match="TargetVerifyInputs, got a DraftExtendInputs"):
            getattr(runner, verb)(batch)
    assert_in_step(runner)


def test_a_batch_may_be_of_a_subclass(runner, make_batch):
    class Own(TargetVerifyInputs):
        """With methods of an engine."""

    assert runner.can_replay(make_batch(2, cls=Own))
    runner.replay(make_batch(2, cls=Own))


@pytest.mark.parametrize("size", ["2", [2], 1.5, 2.0, {}], ids=str)
@pytest.mark.parametrize("verb", ["replay", "run", "run_padded"])
def test_a_padded_size_must_be_an_int(runner, make_batch, size, verb, assert_in_step):
    with pytest.raises((InputError, SizeError)):
        getattr(runner, verb)(make_batch(1), padded_batch_size=size)
    assert_in_step(runner)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_staged_counts_must_be_ints(runner, counts, assert_in_step):
    name = ("batch_size", "num_tokens")[len(counts) - 1]
    with pytest.raises(InputError, match=f"{name} must be an int, got ") as caught:
        runner.stage(*counts)
    assert caught.value.field == name
    assert_in_step(runner)


@pytest.mark.parametrize("name", ["spec", "sizes", "attention", "mutable_state", "check"])
def test_a_setting_of_a_wrong_type_is_named(spec, sizes, name):
    settings = {"spec": spec, "sizes": sizes, "device": "cpu"} | {name: 5}
    with pytest.raises(ConfigError, match=rf"\.{name} must be .*, got 5\.") as caught:
        TargetVerifyRunner(print, **settings)
    assert caught.value.field == name


def test_the_base_class_has_no_mode(spec, sizes):
    with pytest.raises(ConfigError, match=r"Runner declares no mode\. Use a subclass such as"):
        Runner(print, spec=spec, sizes=sizes, device="cpu")


def test_an_attribute_error_of_the_forward_is_not_hidden(make_runner, make_batch):
    runner = make_runner(lambda inputs: inputs.no_such_field)
    with pytest.raises(AttributeError, match="no_such_field"):
        runner.fall_back(make_batch(2))


@pytest.mark.parametrize("forward", [0, "model", [print]], ids=str)
def test_a_forward_must_be_callable(spec, sizes, forward):
    with pytest.raises(ConfigError, match="forward must be callable") as caught:
        TargetVerifyRunner(forward, spec=spec, sizes=sizes, device="cpu")
    assert caught.value.field == "forward"


def test_every_layer_must_be_callable(spec, sizes):
    with pytest.raises(ConfigError, match="forward must be callable, got None"):
        MultiLayerEagleRunner([print, None, print], spec=spec, sizes=sizes, device="cpu")


def test_inputs_must_allow_assignment(make_runner):
    @dataclass(kw_only=True, eq=False)
    class Frozen(TargetVerifyInputs):
        def __setattr__(self, name, value):
            raise AttributeError(name)

    with pytest.raises(ConfigError, match="Frozen restricts assignment"):
        make_runner(inputs_type=Frozen)


OWN = {StepRunner: {"attention", "inputs_type"}}

"""Options that a runner replaces by its own."""


@pytest.mark.parametrize("kind", RUNNERS.values())
def test_a_signature_lists_every_option_with_its_default(kind):
    known, shown = inspect.signature(Runner).parameters, inspect.signature(kind).parameters
    assert next(iter(shown)) == "forward"
    assert shown.keys() >= known.keys() - OWN.get(kind, set())
    for name in RunnerOptions.__annotations__:
        assert shown[name] == known[name]
    assert not [each for each in shown.values() if each.kind is each.VAR_KEYWORD]
    assert inspect.signature(kind.__init__).parameters.keys() == {"self", *shown}


def test_an_unknown_option_is_refused(spec, sizes):
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsizes'"):
        MultiLayerEagleRunner([print] * spec.num_steps, spec=spec, sizes=sizes, batchsizes=[1])
