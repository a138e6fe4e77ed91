"""Sampling parameters are stored as Python numbers, which other ranks receive as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

import graphkit as gk


def test_numpy_numbers_are_stored_as_python_numbers():
    params = gk.SamplingParams(
        max_new_tokens=np.int64(5), temperature=np.float32(0.5), top_k=np.int32(3),
        top_p=np.float64(0.25), min_p=np.float16(0.125), stop_token_ids=np.array([4, 2]),
        seed=np.uint64(7), repetition_penalty=np.float32(1.5), presence_penalty=np.int8(1),
        frequency_penalty=np.float64(-0.5), logit_bias={np.int32(3): np.float32(-2), 5: -np.inf},
        min_tokens=np.int16(2),
    )  # fmt: skip
    values = asdict(params) | {"stop_token_ids": sorted(params.stop_token_ids)}
    assert json.loads(json.dumps(values)) == {
        "max_new_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125,
        "stop_token_ids": [2, 4], "seed": 7, "repetition_penalty": 1.5, "presence_penalty": 1.0,
        "frequency_penalty": -0.5, "logit_bias": {"3": -2.0, "5": -np.inf}, "min_tokens": 2,
        "logprobs": False,
    }  # fmt: skip


@pytest.mark.parametrize("field", ["max_new_tokens", "top_k", "seed"])
def test_bools_are_no_numbers(field):
    with pytest.raises(gk.ConfigError) as caught:
        gk.SamplingParams(**{field: np.bool_(True)})
    assert caught.value.field == field
