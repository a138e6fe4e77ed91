"""A tiny target, draft models with deliberate errors, and engines that must free all memory."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_runs import finish
from graphkit.config import BufferSizes
from graphkit.engine import (
    Drafter,
    EagleDrafter,
    EngineModel,
    MultiLayerDrafter,
    NgramDrafter,
    Request,
    SamplingParams,
    SpeculativeEngine,
)
from graphkit.engine.attention import PagedAttention, SdpaAttention, TritonAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.models import TransformersModel
from graphkit.spec import SpecConfig
from graphkit.spec.config import default_spec
from own_attention import BlockTable, GatherAttention, StackedPool
from small_llama import StandaloneForward, full_logits, small_llama

_MODELS = runpy.run_path(str(Path(__file__).with_name("imperfect_models.py")))
LabellingForward, ErringForward = _MODELS["LabellingForward"], _MODELS["ErringForward"]

VOCAB, HIDDEN, LAYERS, CONTEXT = 96, 32, 1, 96
MOST_TOKENS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8))[:80]
NEAR_TIE = 1e-4
"""Logits closer than this may swap their order with the batch that a row is in."""


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def model(device: str) -> TransformersModel:
    """Random weights, large enough for texts that do not repeat soon."""
    return small_llama(device=device)


@pytest.fixture(scope="session")
def with_errors() -> Callable[..., torch.Tensor]:
    """The errors of ``ErringForward``: ``with_errors(logits, labels, topk)``."""
    return _MODELS["with_errors"]


@pytest.fixture(scope="session")
def labelling_forward() -> Callable[..., Any]:
    """The forward of the target."""
    return LabellingForward


@pytest.fixture(scope="session")
def plain(model: TransformersModel, device: str) -> Callable[..., list[list[int]]]:
    """``plain(prompts, counts)``: greedy continuations without a cache or an engine."""
    known: dict[str, list[list[int]]] = {}

    def decode(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        key = f"{prompts} {counts}"
        if key not in known:
            known[key] = compute(prompts, counts)
        return known[key]

    def compute(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        longest = max(len(p) + n for p, n in zip(prompts, counts, strict=True))
        ids = torch.zeros(len(prompts), longest + 1, dtype=torch.int64, device=device)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
        each, gaps = torch.arange(len(prompts), device=device), []
        for _ in range(max(counts)):
            width = int(ends.max())
            logits = full_logits(model, ids[:, :width])[each, ends - 1]
            best = logits.topk(2)
            gaps.append(best.values[:, 0] - best.values[:, 1])
            ids[each, ends] = best.indices[:, 0]
            ends = (ends + 1).clamp(max=longest)
        for row, gap, count in zip(range(len(prompts)), torch.stack(gaps, 1), counts, strict=True):
            assert gap[:count].min() > NEAR_TIE, f"prompt {row} has a near tie: change the seed"
        texts = zip(prompts, counts, ids.tolist(), strict=True)
        return [text[len(p) : len(p) + n] for p, n, text in texts]

    return decode


@dataclass(frozen=True)
class Task:
    """Prompts of many lengths, their numbers of new tokens, and their greedy continuations."""

    prompts: list[list[int]]
    counts: list[int]
    expected: list[list[int]]

    def first(self, count: int) -> Task:
        return Task(self.prompts[:count], self.counts[:count], self.expected[:count])

    def sampling(self) -> list[SamplingParams]:
        return [SamplingParams(max_new_tokens=count) for count in self.counts]


@pytest.fixture(scope="session")
def task(plain: Callable[..., list[list[int]]]) -> Task:
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(VOCAB, (1 + 7 * i % 19,), generator=generator).tolist() for i in range(52)
    ]
    counts = [13 if i < 8 else 1 + 5 * i % 10 for i in range(52)]
    return Task(prompts, counts, plain(prompts, counts))


class Assembly:
    """Creates engines over one model."""

    def __init__(self, model: TransformersModel, device: str) -> None:
        self.model, self.device = model, device

    def __call__(
        self,
        algorithm: str = "EAGLE",
        *,
        topk: int = 1,
        num_steps: int | tuple[int, ...] = 3,
        num_draft_tokens: int | tuple[int, ...] | None = None,
        page_size: int = 1,
        max_batch_size: int = 8,
        max_context_len: int = CONTEXT,
        kv_tokens: int | None = None,
        linear_attention: bool = False,
        drafter: Callable[[EngineModel], Drafter] = EagleDrafter,
        target: Callable[..., Any] = LabellingForward,
        token_map: torch.Tensor | None = None,
        layers: int | None = None,
        has_own_attention: bool = False,
        **options: Any,
    ) -> SpeculativeEngine:
        """Create an engine whose draft model errs in a third of the rows.

        Args:
            algorithm: As in ``SpecConfig``, or MULTI_LAYER_EAGLE, or EXACT, which is STANDALONE
                with a draft model without errors.
            kv_tokens: Size of the KV pools; ``None`` has room for every request.
            drafter: Creates the drafter from the draft model.
            target: Creates the target's forward from model and attention.
            token_map: Tokens that the draft model of EAGLE3 can draft; ``None`` takes most of them,
                in random order.
            layers: Draft layers of an algorithm that is no name.
            has_own_attention: Whether backend and pools are those of ``own_attention``.
        """
        room = -(-max_context_len // page_size) * page_size
        self._has_own_attention = has_own_attention
        table = BlockTable if has_own_attention else ReqToTokenPool
        self._requests = table(max_batch_size + 2, max_context_len, self.device)
        self._tokens, self._page_size = kv_tokens or max_batch_size * room, page_size
        if algorithm == "NONE":
            num_steps, topk = 0, 1
        longest = num_steps if isinstance(num_steps, int) else max(num_steps)
        self._token_map = None
        if algorithm == "EAGLE3":
            target = partial(target, num_layers=3)
            self._token_map = MOST_TOKENS.to(self.device) if token_map is None else token_map
        attention = self._attention(1)
        return SpeculativeEngine(
            EngineModel(target(self.model, attention), attention),
            self._drafter(
                "MULTI_LAYER_EAGLE" if layers else algorithm, topk, layers or longest, drafter
            ),
            spec=SpecConfig(
                {"MULTI_LAYER_EAGLE": "EAGLE", "EXACT": "STANDALONE"}.get(algorithm, algorithm),
                num_steps,
                topk,
                num_draft_tokens or default_spec("EAGLE", longest, topk).num_draft_tokens,
                page_size=page_size,
                linear_attention=linear_attention,
            ),
            sizes=BufferSizes(
                max_batch_size,
                max_context_len,
                HIDDEN,
                len(self.model.head.weight),
                torch.float32,
                page_size=page_size,
                spec_hidden_size=3 * HIDDEN if algorithm == "EAGLE3" else None,
                draft_vocab_size=None if self._token_map is None else len(self._token_map),
            ),
            device=self.device,
            **options,
        )

    def _attention(self, layers: int) -> PagedAttention:
        """Create a backend over a KV pool with the layers of so many models."""
        if self._has_own_attention:
            pool = StackedPool(self._tokens, self._page_size, LAYERS * layers, 1, 16, self.device)
            return GatherAttention(self._requests, pool)
        kind = TritonAttention if self.device == "cuda" else SdpaAttention
        pool = MHATokenToKVPool(
            self._tokens, self._page_size, torch.float32, 1, 16, LAYERS * layers, self.device
        )
        return kind(self._requests, pool)

    def _drafter(self, algorithm: str, topk: int, num_steps: int, drafter: Any) -> Drafter | None:
        if algorithm in ("NONE", "NGRAM"):
            return NgramDrafter() if algorithm == "NGRAM" else None
        if algorithm == "MULTI_LAYER_EAGLE":
            attention = self._attention(num_steps)
            layers = [ErringForward(self.model, attention, topk, i) for i in range(num_steps)]
            chain = EngineModel(layers, attention)
            return (MultiLayerDrafter if drafter is EagleDrafter else drafter)(chain)
        attention = self._attention(1)
        if algorithm == "EXACT":
            return drafter(EngineModel(StandaloneForward(self.model, attention), attention))
        forward = ErringForward(self.model, attention, topk, token_map=self._token_map)
        return drafter(EngineModel(forward, attention, draft_token_map=self._token_map))


@pytest.fixture
def make_engine(model: TransformersModel, device: str) -> Iterator[Assembly]:
    """An ``Assembly`` whose engines are closed afterwards and checked to have freed all memory."""
    made: list[SpeculativeEngine] = []

    class Counted(Assembly):
        def __call__(self, *args: Any, **options: Any) -> SpeculativeEngine:
            engine = super().__call__(*args, **options)
            made.append(engine)
            return engine

    yield Counted(model, device)
    for engine in made:
        memory = engine.memory
        assert engine.has_work or memory.held_slots == 0, "a finished request still holds slots"
        engine.close()
        assert memory.held_slots == 0
        assert memory.available_rows == memory.pool.size


@pytest.fixture(scope="session")
def run_in_waves() -> Callable[..., list[Request]]:
    """``run_in_waves(engine, task)``: requests join one per step, then as soon as there is room."""

    def run(engine: SpeculativeEngine, task: Task) -> list[Request]:
        requests: list[Request] = []
        for prompt, sampling in zip(task.prompts, task.sampling(), strict=True):
            requests.append(engine.submit(prompt, sampling))
            if len(requests) <= engine.sizes.max_batch_size:
                engine.step()
        finish(engine)
        return requests

    return run
