"""EAGLE and EAGLE-3 heads: published layouts, arithmetic, and weights of the target."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu
from transformers import Qwen2Config

from causal_attention import causal_attend, run_head
from graphkit.errors import ConfigError
from graphkit.models.heads import layers as head_sources
from graphkit.models.heads.eagle import Eagle3Head, EagleHead

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
LAYER = {
    "self_attn.q_proj.weight": (96, 64),
    "self_attn.k_proj.weight": (48, 64),
    "self_attn.v_proj.weight": (48, 64),
    "self_attn.o_proj.weight": (64, 96),
    "mlp.gate_proj.weight": (112, 64),
    "mlp.up_proj.weight": (112, 64),
    "mlp.down_proj.weight": (64, 112),
    "post_attention_layernorm.weight": (64,),
}
EAGLE = {"fc.weight": (64, 128)} | {f"layers.0.{name}": shape for name, shape in LAYER.items()}
OUTPUTS = {"q": 96, "k": 48, "v": 48}
WIDE = {f"self_attn.{x}_proj.weight": (size, 128) for x, size in OUTPUTS.items()}
EAGLE3 = {f"midlayer.{name}": shape for name, shape in (LAYER | WIDE).items()} | {
    "fc.weight": (64, 192),
    "midlayer.input_layernorm.weight": (64,),
    "midlayer.hidden_norm.weight": (64,),
    "norm.weight": (64,),
    "lm_head.weight": (32, 64),
    "d2t": (32,),
}


def layout(module):
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def rotated(heads):
    """Rotate [T, heads, 24] at positions 0 to T - 1, with complex numbers."""
    frequencies = 500.0 ** (-torch.arange(12) / 12)
    angles = torch.arange(len(heads))[:, None, None] * frequencies
    pairs = torch.complex(heads[..., :12], heads[..., 12:]) * torch.exp(1j * angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def attention(state, x):
    query = rotated((x @ state["self_attn.q_proj.weight"].T).view(-1, 4, 24))
    key = rotated((x @ state["self_attn.k_proj.weight"].T).view(-1, 2, 24))
    value = (x @ state["self_attn.v_proj.weight"].T).view(-1, 2, 24)
    out = torch.empty_like(query)
    for head in range(4):
        for row in range(len(x)):
            scores = key[: row + 1, head // 2] @ query[row, head] / math.sqrt(24)
            out[row, head] = scores.softmax(0) @ value[: row + 1, head // 2]
    return out.flatten(1) @ state["self_attn.o_proj.weight"].T


def decoded(state, attended, residual):
    """Compute a layer from the input of its attention."""
    hidden = residual + attention(state, attended)
    x = norm(hidden, state["post_attention_layernorm.weight"])
    gate, up = (x @ state[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return hidden + (silu(gate) * up) @ state["mlp.down_proj.weight"].T


def under(prefix, module):
    state = module.state_dict()
    return {name[len(prefix) :]: state[name] for name in state if name.startswith(prefix)}


@pytest.fixture
def rows():
    """Seven rows of one request: ids, hidden states, positions, attend."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(96, (7,), generator=generator)
    hidden = torch.randn(7, 64, generator=generator)
    return ids, hidden, torch.arange(7), causal_attend(1, 7)


@pytest.mark.parametrize(("name", "expected"), [("eagle", EAGLE), ("eagle3", EAGLE3)])
def test_layout_as_published(name, expected, request):
    assert layout(request.getfixturevalue(name)) == expected


def test_layout_with_optional_tensors(target, eagle):
    bigger = EagleHead(eagle.config, target, fc_bias=True, has_embedding=True)
    assert layout(bigger) == EAGLE | {"fc.bias": (64,), "embed_tokens.weight": (96, 64)}
    sizes = {name: getattr(eagle.config, name) for name in SIZES}
    biased = EagleHead(Qwen2Config(**sizes, head_dim=24), target)
    added = {f"layers.0.self_attn.{x}_proj.bias": (size,) for x, size in OUTPUTS.items()}
    assert layout(biased) == EAGLE | added, "as heads of Qwen2"
    options = {"aux_layers": (0, 1, 2), "fc_bias": True, "has_embedding": True}
    whole = layout(Eagle3Head(eagle.config, target, **options))
    assert whole["lm_head.weight"] == (96, 64)
    assert whole.keys() - EAGLE3.keys() == {"fc.bias", "embed_tokens.weight"}
    assert "d2t" not in whole, "a full vocabulary needs no translation"


def test_eagle_by_hand(eagle, target, rows):
    ids, hidden, *_ = rows
    merged = torch.cat((target.embedding.weight[ids], hidden), 1) @ eagle.fc.weight.T
    expected = decoded(under("layers.0.", eagle), merged, merged)
    out = run_head(eagle, *rows)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(eagle.logits(out), out @ target.lm_head.weight.T)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("width", [64, 192], ids=["own hidden states", "three target layers"])
def test_eagle3_by_hand(eagle3, target, rows, width, is_normed):
    ids, _, *rest = rows
    eagle3.midlayer.norm_before_residual = is_normed
    features = torch.randn(7, width)
    state = under("midlayer.", eagle3)
    hidden = features if width == 64 else features @ eagle3.fc.weight.T
    embedded = norm(target.embedding.weight[ids], state["input_layernorm.weight"])
    normed = norm(hidden, state["hidden_norm.weight"])
    both = torch.cat((embedded, normed), 1)
    out = run_head(eagle3, ids, features, *rest)
    torch.testing.assert_close(out, decoded(state, both, normed if is_normed else hidden))
    expected = norm(out, eagle3.norm.weight) @ eagle3.lm_head.weight.T
    torch.testing.assert_close(eagle3.logits(out), expected)
    logits, same = run_head(eagle3.predict, ids, features, *rest)
    assert torch.equal(same, out)
    assert torch.equal(logits, eagle3.logits(out))


def test_eagle3_tokens_in_the_target_vocabulary(eagle3, target):
    assert eagle3.token_map.tolist() == list(range(0, 96, 3))
    assert Eagle3Head(eagle3.config, target, aux_layers=(0, 1, 2)).token_map is None


@pytest.mark.parametrize(
    ("layers", "text"),
    [(None, "2, 1, -1"), ((0, 1, 3), "0, 1, 3"), ((0, 1), "0, 1,"), ((0, 1, 1, 2), "0, 1, 1, 2")],
)
def test_target_layers_that_do_not_exist_are_refused(eagle3, target, layers, text):
    with pytest.raises(ConfigError, match=f"{text}.*layers 0 to 2") as caught:
        Eagle3Head(eagle3.config, target, aux_layers=layers)
    assert caught.value.field == "aux_layers"


def test_the_default_layers_are_those_of_published_heads(eagle, make_target):
    assert Eagle3Head(eagle.config, make_target(num_hidden_layers=12)).aux_layers == (2, 6, 9)


def test_an_own_embedding_is_used(eagle, target, rows):
    own = EagleHead(eagle.config, target, has_embedding=True)
    own.load_state_dict(eagle.state_dict(), strict=False)
    own.embed_tokens.weight.data = target.embedding.weight.flip(0)
    ids, *rest = rows
    torch.testing.assert_close(run_head(own, 95 - ids, *rest), run_head(eagle, ids, *rest))


def test_attend_gets_the_layer_number(eagle, eagle3, rows):
    ids, hidden, positions, _ = rows
    seen = []

    def attend(layer, query, key, value):
        seen.append((layer, query.shape, key.shape, value.shape))
        return query

    run_head(eagle, ids, hidden, positions, attend)
    run_head(eagle3, ids, hidden, positions, attend)
    assert [layer for layer, *_ in seen] == [0, 0]
    assert {tuple(shapes) for _, *shapes in seen} == {((7, 4, 24), (7, 2, 24), (7, 2, 24))}


@pytest.fixture
def joined(monkeypatch):
    """The ids of each call of the op that joins the inputs of a head."""
    calls, op = [], head_sources.embed_and_join

    def call(ids, *others):
        calls.append(ids)
        return op(ids, *others)

    monkeypatch.setattr(head_sources, "embed_and_join", call)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3 normed"])
def test_one_op_joins_the_inputs_if_no_gradient_is_recorded(
    name, dtype, target, rows, joined, request
):
    head = request.getfixturevalue(name.split()[0]).to(dtype)
    target.to(dtype)
    if name == "eagle3 normed":
        head.midlayer.norm_before_residual = True
    ids, hidden, *rest = rows
    args = ids, hidden.to(dtype), *rest
    with torch.no_grad():
        got = run_head(head, *args)
    assert len(joined) == 1
    assert torch.equal(run_head(head, *args), got)
    assert len(joined) == 1, "the modules ran"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_logits_with_the_hidden_states_are_those_of_the_hidden_states(dtype, target, eagle3, rows):
    ids, hidden, *rest = rows
    args = ids, hidden.to(dtype), *rest
    for module in (target, eagle3):
        module.to(dtype)
    logits, out = run_head(eagle3.predict, *args)
    assert torch.equal(out, run_head(eagle3, *args))
    assert torch.equal(logits, eagle3.logits(out))


class Scaled(torch.nn.Embedding):
    """An embedding that does more than to look rows up."""

    def forward(self, ids):
        return 2 * super().forward(ids)


class Stored(torch.nn.Parameter):
    """A weight of another type, as quantised ones are."""


@pytest.mark.parametrize("kind", ["plain", "scaled", "limited", "replaced", "stored", "float64"])
@torch.no_grad()
def test_other_embeddings_run_as_modules(kind, rows, joined):
    embedding = Scaled(96, 64) if kind == "scaled" else torch.nn.Embedding(96, 64)
    if kind == "limited":
        embedding.max_norm = 1e6
    elif kind == "replaced":
        embedding.forward = Scaled.forward.__get__(Scaled(96, 64))
    elif kind == "stored":
        embedding.weight = Stored(embedding.weight.data)
    elif kind == "float64":
        embedding.double()
    ids, hidden, *_ = rows
    got = head_sources.join_inputs(embedding, ids, hidden)
    assert len(joined) == (kind == "plain")
    assert torch.equal(got, torch.cat((embedding(ids), hidden), 1))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_heads_do_not_own_the_target(name, target, request):
    head = request.getfixturevalue(name)
    theirs = {id(parameter) for parameter in target.parameters()}
    assert not theirs & {id(parameter) for parameter in head.parameters()}
    assert not any("target" in part or "embed" in part for part, _ in head.named_modules())
    head.to(torch.float64)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float64}
    assert {parameter.dtype for parameter in target.parameters()} == {torch.float32}


def test_heads_follow_changes_of_the_target(eagle, target, rows):
    before = run_head(eagle, *rows)
    target.to(torch.float64)
    eagle.to(torch.float64)
    after = run_head(eagle, rows[0], rows[1].double(), *rows[2:])
    torch.testing.assert_close(after.float(), before)
    target.embedding.weight.data.zero_()
    assert not eagle.logits(after).any(), "the tied head went to zero"


@pytest.mark.parametrize("kind", [EagleHead, Eagle3Head])
@pytest.mark.parametrize(
    ("field", "value", "allowed"), [("hidden_size", 32, 64), ("vocab_size", 97, 96)]
)
def test_shared_sizes_must_agree(kind, field, value, allowed, eagle, target):
    sentence = f"has {field} {value}, but its target has {allowed}"
    with pytest.raises(ConfigError, match=sentence) as caught:
        kind(replace(eagle.config, **{field: value}), target)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", [EagleHead, Eagle3Head])
def test_eagle_has_one_layer(kind, eagle, target):
    with pytest.raises(ConfigError, match="num_hidden_layers 1, got 2") as caught:
        kind(replace(eagle.config, num_hidden_layers=2), target)
    assert caught.value.field == "num_hidden_layers"


def test_narrow_ids_and_bfloat16(eagle, target, rows):
    ids, hidden, positions, attend = rows
    narrow = run_head(eagle, ids.int(), hidden, positions.int(), attend)
    assert torch.equal(narrow, run_head(eagle, *rows))
    for module in (target, eagle):
        module.to(torch.bfloat16)
    out = eagle.logits(run_head(eagle, ids, hidden.bfloat16(), positions, attend))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_nothing_depends_on_values(name, target, request):
    """Meta tensors have no values: host synchronisations and data-dependent shapes raise."""
    head = request.getfixturevalue(name).to("meta")
    target.to("meta")
    ids = torch.zeros(6, dtype=torch.long, device="meta")
    hidden = torch.zeros(6, 64, device="meta")
    out = run_head(head, ids, hidden, ids, causal_attend(2, 3))
    assert head.logits(out).shape == (6, 32 if name == "eagle3" else 96)
