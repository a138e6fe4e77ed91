"""Wrong arguments raise errors of graphkit that say what was expected."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from graphkit import ConfigError, InputError, MultiLayerEagleRunner, TargetVerifyInputs

NO_BATCH = [None, {"input_ids": [1]}, [1, 2], torch.zeros(3), 5]


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


def test_an_attribute_error_of_the_forward_is_not_hidden(make_runner, make_batch):
    runner = make_runner(lambda inputs: inputs.no_such_field)
    with pytest.raises(AttributeError, match="no_such_field"):
        runner.fall_back(make_batch(2))


@pytest.mark.parametrize("forward", [0, "model", [print]], ids=str)
def test_a_forward_must_be_callable(spec, sizes, forward):
    from graphkit import TargetVerifyRunner

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
