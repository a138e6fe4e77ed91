"""philox_uniform's launcher against its torch reference; ``test_interpreted.py`` runs this file."""

from __future__ import annotations

import os

import pytest
import torch

from graphkit.ops.registration import OPS
from graphkit.ops.sampling import philox_uniform

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py instead"


@pytest.mark.parametrize("draws", [1, 4, 5, 33])
@pytest.mark.parametrize("requests", [0, 1, 150])
def test_launcher_matches_the_reference(requests, draws):
    torch.manual_seed(requests)
    seeds = torch.randint(-(2**63), 2**63 - 1, (requests,))
    positions = torch.randint(-(2**31), 2**31, (requests,), dtype=torch.int32)
    op = OPS["philox_uniform"]
    samples = op.launch(op.arguments(seeds, positions, draws))
    assert samples.dtype == torch.float32
    assert torch.equal(samples, philox_uniform(seeds, positions, draws))
