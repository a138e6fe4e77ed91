"""A causal language model of transformers over graphkit's pools."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from graphkit.config import require_int
from graphkit.engine import (
    EngineOptions,
    SamplingParams,
    SpeculativeEngine,
)
from graphkit.engine.attention import PagedAttention
from graphkit.engine.kv import ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.models.drafted_model import DraftedModel
from graphkit.models.generation import (
    GenerationDefaults,
    folder_defaults,
    generation_defaults,
    stop_ids,
)
from graphkit.models.layout import head_shape
from graphkit.models.tokenizer import VOCAB_SIZE, ByteTokenizer, FolderTokenizer, Tokenizer
from graphkit.runners import Runner
from graphkit.runners.settings import show_options
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode, SpecConfig

if TYPE_CHECKING:
    from graphkit.models.heads.draft_model import DraftModel


class TransformersModel(DraftedModel):
    """A model that ``load`` has prepared. Its engines, targets and runners have pools of their own.

    Attributes:
        model: The model of transformers. It attends over the pools of the running forward; call
            ``original`` for the model itself.
        original: The model as transformers runs it, with the same weights.
        layout: Its layers that keep state.
        folder: Its folder; ``None`` if it came as an object.
        draft: Its draft model, if any.
        algorithm: The algorithm of its engines and targets, unless they name another.
        trust_remote_code: Whether ``tokenizer`` may run Python code in the folder.
        split: How ranks split the model; ``None`` on one device.
        row_invariant: As passed to ``load``.
    """

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder, with its chat template and sampling parameters.

        The tokens of a folder of 256 tokens without a tokenizer are bytes.

        Raises:
            ConfigError: The model came without a folder.
            CheckpointError: The folder has no tokenizer, or it cannot be loaded.
        """
        if self.folder is None:
            raise ConfigError(
                "the model was passed as an object, which has no tokenizer. Load the folder.",
                field="tokenizer",
            )
        vocab_size = self.model.config.get_text_config(decoder=True).vocab_size
        if vocab_size == VOCAB_SIZE and not Path(self.folder, "tokenizer.json").exists():
            return ByteTokenizer()
        remote = self.trust_remote_code
        return FolderTokenizer(self.folder, vocab_size, trust_remote_code=remote)

    @cached_property
    def _generation_defaults(self) -> GenerationDefaults:
        """What the generation settings of the model say about a request.

        Raises:
            CheckpointError: A setting is malformed.
        """
        vocab_size = head_shape(self.model)[0]
        if self.folder is not None:
            remote = self.trust_remote_code
            return folder_defaults(self.folder, vocab_size, trust_remote_code=remote)
        config = self.original.generation_config
        ids = stop_ids(getattr(config, "eos_token_id", None), type(self.model).__name__)
        return generation_defaults(config, ids, vocab_size)

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """Return sampling parameters as the generation settings of the model have them.

        These are stop tokens, ``top_k``, ``top_p`` and ``min_p``, the temperature if ``do_sample``
        is set, else 0, and what graphkit computes of the settings that change greedy text, such as
        ``repetition_penalty`` and ``suppress_tokens``.

        Args:
            **changes: Arguments of ``SamplingParams`` that replace them.

        Raises:
            CheckpointError: A setting is malformed.
            ConfigError: A value is out of range.
        """
        return self._generation_defaults.sampling_params(**changes)

    @show_options(SpeculativeEngine.__init__, EngineOptions)
    def engine(
        self,
        *,
        algorithm: str | None = None,
        num_steps: int | Sequence[int] | None = None,
        topk: int = 1,
        num_draft_tokens: int | None = None,
        max_batch_size: int = 8,
        max_context_len: int | None = None,
        page_size: int = 1,
        kv_dtype: torch.dtype | None = None,
        kv_slots: int | None = None,
        attention: type[PagedAttention] | None = None,
        **options: Unpack[EngineOptions],
    ) -> SpeculativeEngine:
        """Create an engine with pools of its own. Nothing is captured yet.

        Args:
            algorithm: See ``spec``.
            num_steps: See ``spec``. ``None`` lets each step choose among the lengths of
                ``engine_spec``, 0 among them, by running acceptance and measured times: see
                ``graphkit.ops.draft_length``. Drafts that do not pay cost at most 0.5 % of the
                time of plain decoding, and the time of three steps. An int captures that length
                alone, which needs a fifth of the graphs.
            topk: See ``spec``.
            num_draft_tokens: See ``spec``.
            page_size: See ``spec``.
            max_batch_size: Most requests that run at the same time.
            max_context_len: Most tokens of a request, drafts included; ``None`` selects 1,024, or
                the positions of the model if it has fewer.
            kv_dtype: Data type of the model's keys and values, such as ``torch.float8_e4m3fn``;
                ``None`` selects the data type of the model. A draft model keeps its own.
            kv_slots: KV slots of all requests together, rounded up to whole pages. With fewer than
                all texts need, requests are preempted. ``None`` selects what all requests need at
                their longest, but on a GPU no more than fits in 70 % of its free memory, and
                elsewhere no more than 1,024 per request; in any case enough for the longest one.
            attention: Attention backend; ``None`` selects ``TritonAttention`` on CUDA and for
                ``row_invariant`` models, and otherwise ``SdpaAttention``.
            **options: Further arguments of ``SpeculativeEngine``.

        Raises:
            ConfigError: A setting is out of range, or the model has fewer positions.
        """
        if num_steps is None:
            spec = self.engine_spec(algorithm, topk, num_draft_tokens, page_size)
        else:
            spec = self.spec(algorithm, num_steps, topk, num_draft_tokens, page_size)
        context = self._context_len(max_context_len, 1024)
        return self.engine_with(
            spec, max_batch_size, context, kv_dtype, kv_slots, attention, **options
        )

    def engine_with(
        self,
        spec: SpecConfig,
        max_batch_size: int,
        max_context_len: int,
        kv_dtype: torch.dtype | None = None,
        kv_slots: int | None = None,
        attention: type[PagedAttention] | None = None,
        **options: Any,
    ) -> SpeculativeEngine:
        """Create an engine with settings that ``spec`` returned; see ``engine``."""
        require_int("engine", "max_batch_size", max_batch_size)
        requests = ReqToTokenPool(max_batch_size, max_context_len, self.device)
        slots = self._kv_slots(kv_slots, requests, spec, kv_dtype)
        target = self.engine_model(
            requests, spec, kv_dtype=kv_dtype, slots=slots, attention=attention
        )
        return SpeculativeEngine(
            target,
            self.drafter(requests, spec, slots, attention, target),
            spec=spec,
            sizes=self.sizes(max_batch_size, max_context_len, spec),
            device=self.device,
            group=self.group,
            **options,
        )

    def target(
        self,
        *,
        max_batch_size: int = 8,
        max_context_len: int | None = None,
        kv_dtype: torch.dtype | None = None,
        attention: type[PagedAttention] | None = None,
        chain: DraftModel | None = None,
        **settings: Any,
    ) -> CaptureTarget:
        """Create a target for commands and audits, with pools of its own.

        Args:
            max_batch_size: Largest captured size.
            max_context_len: Most tokens of a request, drafts included; ``None`` selects 256, or the
                positions of the model if it has fewer.
            kv_dtype: See ``engine``. A target whose keys and values have another data type than the
                model is not compared with it.
            attention: See ``engine``.
            chain: MTP layers that run MULTI_LAYER_EAGLE beside the draft model; ``None`` for none.
            **settings: Arguments of ``spec``.

        Raises:
            ConfigError: A setting is out of range, or the model has fewer positions.
        """
        spec = self.spec(**settings)
        page_size = spec.page_size
        require_int("target", "max_batch_size", max_batch_size)
        max_context_len = self._context_len(max_context_len, 256)
        requests = ReqToTokenPool(max_batch_size, max_context_len, self.device)
        columns = -(-max_context_len // page_size) * page_size
        slots = page_size + torch.arange(max_batch_size * columns, device=self.device)
        requests.req_to_token[1:] = slots.view(max_batch_size, columns)[:, :max_context_len]
        model = self.engine_model(requests, spec, kv_dtype=kv_dtype, attention=attention)
        draft, states = self._draft_of(spec), model.recurrent_state
        modes = (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)
        forwards = dict.fromkeys(modes, model.forward)
        backends: dict[ForwardMode, Any] = dict.fromkeys(modes, model.attention)
        modules = nn.ModuleDict({"target": self.model})
        state = {
            **model.attention.kv_pool.tensors(),
            **({} if states is None else states.tensors()),
        }
        if chain is not None and draft is not None and draft.aux_layers:
            raise ConfigError(
                "chain reads the hidden states of one target layer, and the draft model reads "
                "several. Create a target for each of them.",
                field="chain",
            )
        for name, drafting in {"draft": draft, "chain": chain}.items():
            if drafting is None:
                continue
            run = drafting.engine_model(requests, spec, attention=attention, target=model)
            forwards |= dict.fromkeys(drafting.modes, run.forward)
            backends |= dict.fromkeys(drafting.modes, run.attention)
            modules[name] = drafting.module
            if run.attention.kv_pool is not model.attention.kv_pool:
                tensors = run.attention.kv_pool.tensors()
                state |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}

        def engine(*, device: object, **options: Any) -> SpeculativeEngine:  # noqa: ARG001 - the weights have it
            return self.engine_with(
                spec, max_batch_size, max_context_len, kv_dtype, attention=attention, **options
            )

        return CaptureTarget(
            name=type(self.model).__name__,
            spec=spec,
            sizes=self.sizes(max_batch_size, max_context_len, spec),
            forwards=forwards,
            weights=modules if len(modules) > 1 else self.model,
            mutable_state=state,
            attention=backends,
            draft_token_map=None if draft is None else draft.token_map,
            engine=engine,
            model=self.original if kv_dtype in (None, self.dtype) else None,
            recurrent_state=states,
            group=self.group,
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
