"""Engines over small random models of DeepSeek, whose layers attend to latents in their pools.

``graphkit.models`` keeps expanded keys and values of such models. Here the latents themselves are
in an ``MLATokenToKVPool``, and rows of DeepSeek-V3.2 attend to the keys that its indexer selects.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers import AttentionInterface, Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import graphkit as gk
from graphkit.engine import EagleDrafter, EngineModel, NgramDrafter, SamplingParams
from graphkit.engine.attention import (
    AbsorbedProjections,
    IndexRows,
    SdpaAttention,
    SparseAttention,
    TritonAttention,
)
from graphkit.engine.kv import DSATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.models.heads.config import LayerConfig
from graphkit.models.heads.eagle import EagleHead
from graphkit.models.heads.forwards import EagleForward
from graphkit.models.heads.pools import head_attention
from graphkit.models.heads.sources import HeadSources
from graphkit.ops.index_scores import dequantised
from small_models import LATENT, small_model

KINDS = {
    "deepseek_v3": {},
    "deepseek_v32": LATENT | {
        "index_topk": 6, "index_head_dim": 16, "index_n_heads": 8,
        "mlp_layer_types": ["dense", "sparse"],
    },
}  # fmt: skip
CONTEXT, NEW_TOKENS = 64, 14
PROMPTS = [[5, 9, 5, 9, 5, 9, 5], list(range(20, 41)), [7]]
_BATCH: ContextVar[Any] = ContextVar("batch")
"""The inputs of the running forward, and the backend."""
_UPDATE = getattr(Cache, "update_indexer", None)


@dataclass
class Case:
    """A model and its own greedy output.

    Attributes:
        model: The model, which attends through graphkit once ``engine`` was called.
        expected: Its tokens behind each prompt, by ``generate``.
    """

    model: Any
    expected: list[list[int]]


def case(kind: str, device: str = "cpu") -> Case:
    """Create a model and let it generate by its own code."""
    model = small_model(kind, **KINDS[kind]).to(device)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("batched_mm")
    expected = []
    with mock.patch.object(Cache, "update_indexer", update_indexer):
        for prompt in PROMPTS:
            ids = model.generate(
                torch.tensor([prompt], device=device), do_sample=False, max_new_tokens=NEW_TOKENS,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            expected.append(ids[0, len(prompt) :].tolist())
    return Case(model, expected)


def update_indexer(cache: Any, keys: torch.Tensor, layer: int, *, update: Any = _UPDATE) -> Any:
    """Round index keys [1, T, I] to the eight bits that graphkit stores."""
    _, tokens, size = keys.shape
    pool = DSATokenToKVPool(tokens, 1, torch.float32, 1, 1, 1, keys.device, size)
    pool.set_index_k_buffer(0, torch.arange(1, tokens + 1, device=keys.device), keys[0])
    return update(cache, dequantised(pool.get_index_k_buffer(0)[1:])[None], layer)


def attend(
    module: Any, query: Any, key: Any, value: Any, _mask: Any, indices: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Attend in one layer, called by transformers: [1, heads, T, D] to [1, T, heads, D]."""
    inputs, backend = _BATCH.get()
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    rows = module.layer_idx, module.absorbed.query(query), key, value
    rest = inputs.out_cache_loc, inputs.attention
    if indices is None:
        attended = backend.attend(*rows, *rest)
    else:
        attended = backend.attend_selected(*rows, indices, *rest)
    return module.absorbed.value(attended)[None], None


def index_rows(
    indexer: Any, hidden: Any, latent_query: Any, rotation: Any, *_: Any, **__: Any
) -> IndexRows:
    """Return what an indexer of DeepSeek-V3.2 computes for rows, instead of the keys it selects."""
    size = indexer.qk_rope_head_dim
    query = indexer.wq_b(latent_query).unflatten(-1, (indexer.n_heads, -1))
    key = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    rotated = apply_rotary_pos_emb(query[..., :size], key[..., :size], *rotation, unsqueeze_dim=2)
    query = torch.cat((rotated[0], query[..., size:]), -1)
    key = torch.cat((rotated[1], key[..., size:]), -1)
    scale = indexer.softmax_scale * indexer.n_heads**-0.5
    return IndexRows(query[0], indexer.weights_proj(hidden)[0] * scale, key[0, :, 0])


def attention_of(model: Any, requests: ReqToTokenPool, page_size: int) -> Any:
    """Create a pool of latents and a backend, and let the model attend through it."""
    AttentionInterface.register("latents", attend)
    model.config._attn_implementation = "latents"
    config, device = model.config, requests.device
    kind = TritonAttention if device.type == "cuda" else SdpaAttention
    layers = [each.self_attn for each in model.model.layers]
    for each in layers:
        each.expand_kv = lambda latents, rotated: (latents, rotated)
        heads = (config.num_attention_heads, config.qk_nope_head_dim)
        each.absorbed = AbsorbedProjections(each.kv_b_proj.weight, *heads)
    sizes = (
        requests.size * CONTEXT, page_size, model.dtype, config.kv_lora_rank,
        config.qk_rope_head_dim, len(layers), device,
    )  # fmt: skip
    if not hasattr(config, "index_topk"):
        return kind(requests, MLATokenToKVPool(*sizes), scale=layers[0].scaling)
    for each in layers:
        each.indexer.forward = partial(index_rows, each.indexer)
    pool = DSATokenToKVPool(*sizes, config.index_head_dim)
    topk = config.index_topk
    return SparseAttention(requests, pool, scale=layers[0].scaling, topk=topk, kind=kind)


def engine(
    model: Any, algorithm: str, *, topk: int = 1, generation: str | None = None, page_size: int = 1
) -> gk.SpeculativeEngine:
    """Create an engine of NGRAM, or of EAGLE with a random head."""
    device, config = model.device, model.config
    requests = ReqToTokenPool(4, CONTEXT, device)
    attention = attention_of(model, requests, page_size)

    def forward(inputs: Any) -> gk.ForwardOutput:
        token = _BATCH.set((inputs, attention))
        out = model(
            input_ids=inputs.input_ids[None], position_ids=inputs.positions[None],
            attention_mask=torch.zeros(1, 1, 1, 1),  # passed on as it is
            use_cache=False, output_hidden_states=True,
        )  # fmt: skip
        _BATCH.reset(token)
        return gk.ForwardOutput(
            next_token_logits=out.logits[0], hidden_states=out.hidden_states[-1][0]
        )

    drafter: Any = NgramDrafter()
    if algorithm == "EAGLE":
        kind = TritonAttention if device.type == "cuda" else SdpaAttention
        head = _random_head(model).to(device)
        drafts = head_attention(head.config, requests, page_size, model.dtype, kind=kind)
        drafter = EagleDrafter(EngineModel(EagleForward(head, drafts), drafts))
    return gk.SpeculativeEngine(
        EngineModel(forward, attention),
        drafter,
        spec=gk.SpecConfig(algorithm, 3, topk, 4 if topk == 1 else 6, page_size=page_size),
        sizes=gk.BufferSizes(
            4, CONTEXT, config.hidden_size, config.vocab_size, model.dtype, page_size
        ),
        batch_sizes=[4],
        device=device,
        generation=generation,
        steps_per_launch=4,
    )


def generated(engine: gk.SpeculativeEngine) -> list[list[int]]:
    """Capture, and return the tokens of each prompt, all running at once."""
    with engine:
        engine.capture()
        requests = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
        return [request.output_ids for request in requests]


def _random_head(model: Any) -> EagleHead:
    config = LayerConfig(
        vocab_size=model.config.vocab_size, hidden_size=model.config.hidden_size,
        intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    layers = model.config.num_hidden_layers
    target = HeadSources(model.get_input_embeddings(), model.lm_head, layers)
    torch.manual_seed(1)
    return EagleHead(config, target).eval().requires_grad_(False)
