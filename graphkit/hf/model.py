"""A causal language model of transformers over graphkit's pools."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from types import NoneType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from graphkit.config import BufferSizes, require_type
from graphkit.engine import EngineModel, NgramDrafter, SpeculativeEngine
from graphkit.errors import ConfigError
from graphkit.hf.forward import TransformersForward
from graphkit.hf.layout import ModelLayout, output_head
from graphkit.hf.pools import LayerGroupAttention, recurrent_states
from graphkit.kv import ReqToTokenPool
from graphkit.runners import Runner
from graphkit.spec import ForwardMode, SpecConfig
from graphkit.spec.config import default_spec
from graphkit.targets import CaptureTarget

ALGORITHMS = ("NONE", "NGRAM")
"""Algorithms that need no draft model."""


class TransformersModel:
    """A model that ``load`` has prepared. Its engines, targets and runners have pools of their own.

    Attributes:
        model: The model of transformers. It attends over the pools of the running forward; call
            ``original`` for the model itself.
        original: The model as transformers runs it, with the same weights.
        layout: Its layers that keep state.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        original: PreTrainedModel,
        layout: ModelLayout,
        folder: str | None = None,
    ) -> None:
        self.model, self.original, self.layout, self._folder = model, original, layout, folder

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the folder.

        Raises:
            ConfigError: The model came without a folder, or the folder has no tokenizer.
        """
        from transformers import AutoTokenizer

        if self._folder is None:
            raise ConfigError(
                "the model was passed as an object, which has no tokenizer. Load the folder.",
                field="tokenizer",
            )
        return AutoTokenizer.from_pretrained(self._folder)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    def spec(
        self,
        algorithm: str | None = None,
        num_steps: int | Sequence[int] = 3,
        topk: int = 1,
        num_draft_tokens: int | None = None,
        page_size: int = 1,
    ) -> SpecConfig:
        """Return the settings of an algorithm.

        Args:
            algorithm: ``"NONE"`` or ``"NGRAM"``; ``None`` selects NGRAM.
            num_steps: Draft steps, or several ascending numbers of them; see ``SpecConfig``.
            topk: Branches per draft step: 1 drafts chains, more drafts trees.
            num_draft_tokens: Nodes per request in verify, the bonus token included; ``None``
                selects ``num_steps + 1`` for a chain and twice that for a tree.
            page_size: Slots per KV page.

        Raises:
            ConfigError: A setting is out of range, or the algorithm needs a draft model.
        """
        expected = "the name of an algorithm, or None"
        require_type("spec", "algorithm", algorithm, (str, NoneType), expected)
        name = (algorithm or "NGRAM").upper()
        if name not in ALGORITHMS:
            raise ConfigError(
                f"{name} needs a draft model. Use one of {', '.join(ALGORITHMS)}.",
                field="algorithm",
            )
        return default_spec(
            name,
            num_steps,
            topk,
            num_draft_tokens,
            page_size,
            linear_attention=bool(self.layout.recurrent),
        )

    def engine(
        self,
        *,
        algorithm: str | None = None,
        num_steps: int | Sequence[int] = 3,
        topk: int = 1,
        num_draft_tokens: int | None = None,
        max_batch_size: int = 8,
        max_context_len: int = 1024,
        page_size: int = 1,
        **options: Any,
    ) -> SpeculativeEngine:
        """Create an engine with pools of its own. Nothing is captured yet.

        Args:
            algorithm: See ``spec``.
            num_steps: See ``spec``.
            topk: See ``spec``.
            num_draft_tokens: See ``spec``.
            page_size: See ``spec``.
            max_batch_size: Most requests that run at the same time.
            max_context_len: Most tokens of a request, drafts included.
            **options: Further arguments of ``SpeculativeEngine``.

        Raises:
            ConfigError: A setting is out of range.
        """
        spec = self.spec(algorithm, num_steps, topk, num_draft_tokens, page_size)
        return self.engine_with(spec, max_batch_size, max_context_len, **options)

    def engine_with(
        self, spec: SpecConfig, max_batch_size: int, max_context_len: int, **options: Any
    ) -> SpeculativeEngine:
        """Create an engine with settings that ``spec`` returned; see ``engine``."""
        requests = ReqToTokenPool(max_batch_size, max_context_len, self.device)
        return SpeculativeEngine(
            self._engine_model(requests, spec),
            NgramDrafter() if spec.num_steps else None,
            spec=spec,
            sizes=self._sizes(max_batch_size, max_context_len, spec.page_size),
            device=self.device,
            **options,
        )

    def target(
        self, *, max_batch_size: int = 8, max_context_len: int = 256, **settings: Any
    ) -> CaptureTarget:
        """Create a target for commands and audits, with pools of its own.

        Args:
            max_batch_size: Largest captured size.
            max_context_len: Most tokens of a request, drafts included.
            **settings: Arguments of ``spec``.

        Raises:
            ConfigError: A setting is out of range.
        """
        spec = self.spec(**settings)
        page_size = spec.page_size
        requests = ReqToTokenPool(max_batch_size, max_context_len, self.device)
        columns = -(-max_context_len // page_size) * page_size
        slots = page_size + torch.arange(max_batch_size * columns, device=self.device)
        requests.req_to_token[1:] = slots.view(max_batch_size, columns)[:, :max_context_len]
        model = self._engine_model(requests, spec)
        states = model.recurrent_state
        modes = (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)
        return CaptureTarget(
            name=type(self.model).__name__,
            spec=spec,
            sizes=self._sizes(max_batch_size, max_context_len, page_size),
            forwards=dict.fromkeys(modes, model.forward),
            weights=self.model,
            mutable_state={
                **model.attention.kv_pool.tensors(),
                **({} if states is None else states.tensors()),
            },
            attention=model.attention,
            engine=partial(_engine_of_target, self, spec, max_batch_size, max_context_len),
            model=self.original,
            recurrent_state=states,
        )

    def runner(
        self, mode: ForwardMode, *, batch_sizes: Sequence[int] | None = None, **options: Any
    ) -> Runner[Any, Any]:
        """Create the runner of a mode of a new target.

        Args:
            mode: TARGET_VERIFY or DECODE.
            batch_sizes: Sizes to capture; ``None`` selects the default list.
            **options: Arguments of ``target``.
        """
        return self.target(**options).runner(mode, device=self.device, batch_sizes=batch_sizes)

    @property
    def _head_shape(self) -> tuple[int, int]:
        """Rows and columns of the head: vocabulary and hidden size."""
        vocab_size, hidden_size = output_head(self.model).weight.shape  # type: ignore[misc]
        return int(vocab_size), int(hidden_size)

    def _sizes(self, max_batch_size: int, max_context_len: int, page_size: int) -> BufferSizes:
        vocab_size, hidden_size = self._head_shape
        return BufferSizes(
            max_batch_size, max_context_len, hidden_size, vocab_size, self.model.dtype,
            page_size=page_size,
        )  # fmt: skip

    def _engine_model(self, requests: ReqToTokenPool, spec: SpecConfig) -> EngineModel:
        attention = LayerGroupAttention(
            requests, self.layout.attention, spec.page_size, self.model.dtype
        )
        width = spec.tokens_per_request(ForwardMode.TARGET_VERIFY)
        states = recurrent_states(self.layout, requests.size, width, self.device)
        forward = TransformersForward(self.model, self.layout, attention, states)
        return EngineModel(forward, attention, states)


def _engine_of_target(
    model: TransformersModel,
    spec: SpecConfig,
    max_batch_size: int,
    max_context_len: int,
    *,
    device: object,  # noqa: ARG001 - commands pass it; it is that of the weights
    **options: Any,
) -> SpeculativeEngine:
    """Create the engine of a target; ``options`` are those that commands pass."""
    return model.engine_with(spec, max_batch_size, max_context_len, **options)
