"""Engines over small random transformers models of every attention kind."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import Cache

import graphkit as gk
from graphkit.attention import SdpaAttention, TritonAttention
from graphkit.engine import EagleDrafter, EngineModel, NgramDrafter, SamplingParams
from graphkit.kv import DSATokenToKVPool, ReqToTokenPool
from graphkit.ops.index_scores import dequantised
from graphkit.reference import EagleHead, LlamaConfig
from graphkit.reference.pools import PoolFactory
from graphkit.reference.runner_forwards import EagleForward

EXAMPLE = Path(__file__).parents[2] / "tools" / "examples" / "transformers_models.py"
_UPDATE = getattr(Cache, "update_indexer", None)
CONTEXT, NEW_TOKENS = 64, 14
PROMPTS = [[5, 9, 5, 9, 5, 9, 5], list(range(20, 41)), [7]]
"""The second is longer than the windows."""


@cache
def example() -> SimpleNamespace:
    """The module of the example."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


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
    """Create a model and let it generate by its own code.

    Its weights are larger than at the start of training, so that its text is no single token.
    """
    model = example().random_model(kind).to(device).eval()
    model.set_attn_implementation("eager")  # others ignore Gemma 2's softcap
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    if kind == "gpt_oss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.uniform_(-1, 2)
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


def engine(
    model: Any, algorithm: str, *, topk: int = 1, generation: str | None = None, page_size: int = 1
) -> gk.SpeculativeEngine:
    """Create an engine of NGRAM, or of EAGLE with a random head."""
    device, config = model.device, model.config
    requests = ReqToTokenPool(4, CONTEXT, device)
    attention = example().attention_of(model, requests, page_size)

    def forward(inputs: Any) -> gk.ForwardOutput:
        logits, hidden = example().run(model, inputs, attention)
        return gk.ForwardOutput(next_token_logits=logits, hidden_states=hidden)

    drafter: Any = NgramDrafter()
    if algorithm == "EAGLE":
        kind = TritonAttention if device.type == "cuda" else SdpaAttention
        head = _random_head(model).to(device)
        drafts = PoolFactory(requests, kind, page_size, model.dtype).attention(head.config)
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
    config = LlamaConfig(
        vocab_size=model.config.vocab_size, hidden_size=model.config.hidden_size,
        intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    parts = {"embedding": model.get_input_embeddings(), "lm_head": model.lm_head}
    target = SimpleNamespace(config=model.config, logits=model.lm_head, **parts)
    torch.manual_seed(1)
    return EagleHead(config, target).eval().requires_grad_(False)
