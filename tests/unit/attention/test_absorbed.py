"""Absorbed projections: attention over latents equals attention over the keys made from them."""

from __future__ import annotations

import pytest
import torch

from graphkit.engine.attention import AbsorbedProjections
from graphkit.errors import ConfigError

HEADS, PLAIN, ROTATED, RANK, VALUE = 3, 8, 4, 16, 5


def test_attention_over_latents_is_that_over_their_keys_and_values():
    torch.manual_seed(0)
    weight = torch.randn(HEADS * (PLAIN + VALUE), RANK)
    query = torch.randn(2, HEADS, PLAIN + ROTATED)
    latents, rotated = torch.randn(7, RANK), torch.randn(7, ROTATED)
    made = (latents @ weight.T).view(7, HEADS, PLAIN + VALUE)
    keys = torch.cat([made[..., :PLAIN], rotated[:, None].expand(-1, HEADS, -1)], -1)
    weights = torch.einsum("tnd,lnd->tnl", query, keys).softmax(-1)
    want = torch.einsum("tnl,lnv->tnv", weights, made[..., PLAIN:])

    absorbed = AbsorbedProjections(weight, HEADS, PLAIN)
    rows = torch.cat([latents, rotated], -1)
    weights = torch.einsum("tnd,ld->tnl", absorbed.query(query), rows).softmax(-1)
    got = absorbed.value(torch.einsum("tnl,lr->tnr", weights, latents))
    torch.testing.assert_close(got, want)
    plain, values = absorbed.keys_and_values(latents[:, None])
    torch.testing.assert_close(plain, made[..., :PLAIN])
    torch.testing.assert_close(values, made[..., PLAIN:])


def test_the_weight_is_not_copied():
    weight = torch.randn(HEADS * (PLAIN + VALUE), RANK)
    absorbed, query = AbsorbedProjections(weight, HEADS, PLAIN), torch.randn(2, HEADS, PLAIN)
    weight.zero_()
    assert absorbed.query(query).eq(0).all()


@pytest.mark.parametrize(
    ("shape", "heads", "plain"), [((39, 4), 2, 8), ((24, 4), 3, 8), ((39,), 3, 8), ((39, 4), 0, 8)]
)
def test_a_weight_that_does_not_fit_is_refused(shape, heads, plain):
    with pytest.raises(ConfigError, match="AbsorbedProjections"):
        AbsorbedProjections(torch.zeros(shape), heads, plain)
