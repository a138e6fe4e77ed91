"""A CaptureTarget refuses what it cannot use when it is made, and names the argument."""

from __future__ import annotations

import pytest

import graphkit as gk
from graphkit.errors import InputError, TargetError

VERIFY, DRAFT = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DRAFT
LAYERS = gk.ForwardMode.MULTI_LAYER_EAGLE
ODD = [None, 5, "text", [5], object]
NULLABLE = (
    "sample_batch", "weights", "mutable_state", "persistent_tensors", "attention", "inputs_type",
    "output_type",
)  # fmt: skip


def refusal(make_target, **facts):
    with pytest.raises(TargetError) as caught:
        make_target(**facts)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "field",
    ["spec", "sizes", "forwards", "sample_batch", "weights", "mutable_state", "persistent_tensors",
     "host_values", "attention", "inputs_type", "output_type"],
)  # fmt: skip
def test_an_argument_of_a_wrong_type_is_refused(make_target, field, value):
    is_valid = (value is None and field in NULLABLE) or (
        value is object
        and field in ("sample_batch", "persistent_tensors", "inputs_type", "output_type")
    )
    if is_valid:
        make_target(**{field: value})
    else:
        text = refusal(make_target, **{field: value})
        assert text.startswith(f"target 'tiny': {field} is {value!r}. Pass ")


@pytest.mark.parametrize("value", [None, 5, ["tiny"]])
def test_a_name_that_is_no_text_is_refused(make_target, value):
    assert refusal(make_target, name=value) == (
        f"target {value!r}: name is {value!r}. Pass a text for messages and records."
    )


@pytest.mark.parametrize("forward", [None, 5, "forward", [print]], ids=repr)
def test_a_forward_that_cannot_be_called_is_refused(make_target, forward):
    assert refusal(make_target, forwards={VERIFY: forward}) == (
        f"target 'tiny': the forward of TARGET_VERIFY is {forward!r}. Pass a function or a module "
        "that takes the inputs of the mode."
    )


@pytest.mark.parametrize("forwards", [None, [None, print, print], [print, 5, print]], ids=repr)
def test_a_forward_of_a_chain_that_cannot_be_called_is_refused(make_target, forwards):
    text = refusal(make_target, forwards={LAYERS: forwards})
    assert "forward of MULTI_LAYER_EAGLE is " in text


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (5, "a setter"), ((print,), "a setter"), ((None, [1, 2]), "a setter"),
        ((print, None), "two or more"), ((print, [1]), "two or more"),
    ],
    ids=repr,
)  # fmt: skip
def test_an_invalid_host_value_is_refused(make_target, setting, text):
    found = refusal(make_target, host_values={"scale": setting})
    assert found.startswith("target 'tiny': host_values['scale'] is ")
    assert text in found


@pytest.mark.parametrize("field", ["attention", "optional_fields", "inputs_type", "output_type"])
def test_a_setting_by_something_else_than_a_mode_is_refused(make_target, field):
    text = refusal(make_target, **{field: {"TARGET_VERIFY": None}})
    assert text.startswith(f"target 'tiny': {field} has a value for 'TARGET_VERIFY'. Use graphkit.")


@pytest.mark.parametrize("field", ["attention", "inputs_type", "output_type"])
def test_an_invalid_setting_of_a_mode_is_refused(make_target, field):
    text = refusal(make_target, **{field: {VERIFY: 5}})
    assert text.startswith(f"target 'tiny': {field}[TARGET_VERIFY] is 5. Pass ")


@pytest.mark.parametrize("modes", ["DRAFT", [[]], [gk.ForwardMode.IDLE], [None]], ids=repr)
def test_a_served_mode_without_a_runner_is_refused(make_target, modes):
    assert "which has no runner. Use graphkit.ForwardMode, one of " in refusal(
        make_target, served_modes=modes
    )


@pytest.mark.parametrize("weights", [{"head": None}, {5: 5}], ids=repr)
def test_weights_that_are_no_tensors_are_refused(make_target, weights):
    assert "weights has no tensor for " in refusal(make_target, weights=weights)


@pytest.mark.parametrize("batch", [None, {}, 5, {"input_ids": [1]}], ids=repr)
def test_a_sample_batch_that_returns_no_batch_is_refused(make_target, batch):
    target = make_target(sample_batch=lambda *_: batch)
    with pytest.raises(TargetError, match=r"Return graphkit.TargetVerifyInputs\."):
        gk.capture_target(target, device="cpu")


def test_a_batch_of_a_different_mode_is_refused(make_target):
    sample_batch = make_target().sample_batch
    target = make_target(
        modes=(DRAFT,), sample_batch=lambda mode, *rest: sample_batch(VERIFY, *rest)
    )
    with pytest.raises(TargetError, match=r"returned a TargetVerifyInputs for DRAFT. Return"):
        target.batch(DRAFT, 2, 7)


@pytest.mark.parametrize("field", ["req_pool_indices", "seq_lens", "input_ids", "out_cache_loc"])
@pytest.mark.parametrize(
    "value", [None, 5, "text", {}, object()], ids=lambda value: type(value).__name__
)
def test_a_field_of_a_wrong_type_is_refused(make_target, field, value):
    valid = make_target().sample_batch

    def sample_batch(*arguments):
        batch = valid(*arguments)
        setattr(batch, field, value)
        return batch

    target = make_target(sample_batch=sample_batch)
    with pytest.raises((InputError, TargetError), match=f"field '{field}'"):
        target.runner(VERIFY, device="cpu").fall_back(target.batch(VERIFY, 2, 7))
