"""A tiny target, draft models that err on purpose, and engines that give back what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphkit.attention import PagedAttention, SdpaAttention, TritonAttention
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
from graphkit.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.reference import LlamaConfig, LlamaModel, full_logits
from graphkit.reference.forwards import StandaloneForward, VerifyForward
from graphkit.runners import VerifyOutput
from graphkit.spec import SpecConfig

VOCAB, HIDDEN, LAYERS, CONTEXT = 96, 32, 1, 96
NEAR_TIE = 1e-4
"""Logits this close may change places with the batch that a row happens to be in."""


def _label(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Hidden states that say which token stands where, [T, H]."""
    named = torch.stack((tokens, positions), 1).float()
    return torch.nn.functional.pad(named, (0, HIDDEN - 2))


def _misled(logits: torch.Tensor, label: torch.Tensor, topk: int) -> torch.Tensor:
    """Logits whose best token changes places with one of lower rank, in a third of all places.

    In a sixth it is out of the K best, in another sixth the last of them. Which places those are is
    read off the label: a hidden state that went astray errs elsewhere.
    """
    kind = (3 * label[:, 0] + 5 * label[:, 1]).long() % 6
    rank = torch.where(kind == 0, topk, torch.where(kind == 1, topk - 1, 0))[:, None]
    values, tokens = logits.topk(topk + 1)
    logits = logits.scatter(1, tokens[:, :1], values.gather(1, rank))
    return logits.scatter(1, tokens.gather(1, rank), values[:, :1])


class LabellingForward(VerifyForward):
    """The target, but its hidden states are labels."""

    def __call__(self, inputs: Any) -> VerifyOutput:
        output = super().__call__(inputs)
        label = _label(inputs.input_ids, inputs.positions)
        return VerifyOutput(next_token_logits=output.next_token_logits, hidden_states=label)


class ErringForward:
    """The target's weights as a draft model: nearly always right, but for what misleads it."""

    def __init__(self, model: LlamaModel, attention: Any, topk: int, layer: int = 0) -> None:
        self._model, self._attention, self._topk = model, attention, topk
        self._first_layer = layer * LAYERS

    def __call__(self, inputs: Any) -> VerifyOutput:
        def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
            layer += self._first_layer
            return self._attention.attend(layer, *qkv, inputs.out_cache_loc, inputs.attention)

        hidden = self._model(inputs.input_ids, inputs.positions, attend)
        fed = inputs.hidden_states
        label = _label(inputs.input_ids, inputs.positions) if fed is None else fed
        return VerifyOutput(
            next_token_logits=_misled(self._model.logits(hidden), label, self._topk),
            hidden_states=None if fed is None else _label(inputs.input_ids, fed[:, 1] + 1),
        )


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def model(device: str) -> LlamaModel:
    """Random weights, large enough for texts that do not soon repeat themselves."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
    )
    model = LlamaModel(config)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model.eval().requires_grad_(False).to(device)


@pytest.fixture(scope="session")
def misled() -> Callable[..., torch.Tensor]:
    """Where ``ErringForward`` errs: ``misled(logits, label, topk)``."""
    return _misled


@pytest.fixture(scope="session")
def labelling() -> type[LabellingForward]:
    """The forward of the target."""
    return LabellingForward


@pytest.fixture(scope="session")
def plain(model: LlamaModel, device: str) -> Callable[..., list[list[int]]]:
    """``plain(prompts, counts)``: greedy continuations, without cache, batch or engine."""

    def decode(prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
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
            assert gap[:count].min() > NEAR_TIE, f"prompt {row} has a near tie: take another one"
        texts = zip(prompts, counts, ids.tolist(), strict=True)
        return [text[len(p) : len(p) + n] for p, n, text in texts]

    return decode


@dataclass(frozen=True)
class Task:
    """Prompts of many lengths that end at many lengths, and what comes after them."""

    prompts: list[list[int]]
    counts: list[int]
    expected: list[list[int]]

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
    """Makes engines over one model from their parts."""

    def __init__(self, model: LlamaModel, device: str) -> None:
        self.model, self.device = model, device

    def __call__(
        self,
        algorithm: str = "EAGLE",
        *,
        topk: int = 1,
        num_steps: int = 3,
        num_draft_tokens: int | None = None,
        page_size: int = 1,
        max_batch_size: int = 8,
        max_context_len: int = CONTEXT,
        kv_tokens: int | None = None,
        linear_attention: bool = False,
        drafter: Callable[[EngineModel], Drafter] = EagleDrafter,
        target: Callable[..., Any] = LabellingForward,
        **options: Any,
    ) -> SpeculativeEngine:
        """An engine whose draft model errs now and then.

        Args:
            algorithm: One of ``DRAFTS``; EXACT is STANDALONE with a draft model that never errs.
            kv_tokens: Size of the KV pools; room for every request if left out.
            drafter, target: What to wrap the models in.
        """
        room = -(-max_context_len // page_size) * page_size
        self._requests = ReqToTokenPool(max_batch_size, max_context_len, self.device)
        self._tokens, self._page_size = kv_tokens or max_batch_size * room, page_size
        if algorithm == "NONE":
            num_steps, topk = 0, 1
        attention = self._attention(1)
        return SpeculativeEngine(
            EngineModel(target(self.model, attention), attention),
            self._drafter(algorithm, topk, num_steps, drafter),
            spec=SpecConfig(
                {"MULTI_LAYER_EAGLE": "EAGLE", "EXACT": "STANDALONE"}.get(algorithm, algorithm),
                num_steps,
                topk,
                num_draft_tokens or (num_steps + 1) * min(topk, 2),
                page_size=page_size,
                linear_attention=linear_attention,
            ),
            sizes=BufferSizes(
                max_batch_size,
                max_context_len,
                HIDDEN,
                self.model.config.vocab_size,
                torch.float32,
                page_size=page_size,
            ),
            device=self.device,
            **options,
        )

    def _attention(self, layers: int) -> PagedAttention:
        """A backend over KV pools for as many models stacked on each other."""
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
            return MultiLayerDrafter(EngineModel(layers, attention))
        attention = self._attention(1)
        if algorithm == "EXACT":
            return drafter(EngineModel(StandaloneForward(self.model, attention), attention))
        return drafter(EngineModel(ErringForward(self.model, attention, topk), attention))


@pytest.fixture
def make_engine(model: LlamaModel, device: str) -> Iterator[Assembly]:
    """An ``Assembly`` whose engines are closed afterwards, and then hold nothing any more."""
    made: list[tuple[SpeculativeEngine, int]] = []

    class Counted(Assembly):
        def __call__(self, *args: Any, **options: Any) -> SpeculativeEngine:
            engine = super().__call__(*args, **options)
            made.append((engine, engine.memory.available_slots))
            return engine

    yield Counted(model, device)
    for engine, slots in made:
        memory = engine.memory
        assert engine.has_work or memory.held_slots == 0, "an ended request still holds slots"
        engine.close()
        assert memory.held_slots == 0
        assert memory.available_slots == slots
        assert memory.available_rows == memory.pool.size


@pytest.fixture(scope="session")
def run_in_waves() -> Callable[..., list[Request]]:
    """``run_in_waves(engine, task)``: requests join one by one, then as soon as there is room."""

    def run(engine: SpeculativeEngine, task: Task) -> list[Request]:
        requests: list[Request] = []
        for prompt, sampling in zip(task.prompts, task.sampling(), strict=True):
            requests.append(engine.submit(prompt, sampling))
            if len(requests) <= engine.sizes.max_batch_size:
                engine.step()
        while engine.has_work:
            engine.step()
        return requests

    return run
