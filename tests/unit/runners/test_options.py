"""Every runner takes and shows the options of ``Runner``."""

import inspect

import pytest

from graphkit.runners import RUNNERS, MultiLayerEagleRunner, Runner, RunnerOptions, StepRunner

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
