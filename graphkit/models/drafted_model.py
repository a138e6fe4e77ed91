"""A model of transformers and its draft model, over KV pools of one engine or target."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from graphkit.config import BufferSizes, require_int, require_type
from graphkit.distributed import RankGroup
from graphkit.engine import Drafter, EngineModel, NgramDrafter
from graphkit.engine.attention import PagedAttention
from graphkit.engine.kv import ReqToTokenPool
from graphkit.errors import ConfigError
from graphkit.models.folder import abbreviate
from graphkit.models.forward import TransformersForward
from graphkit.models.layout import DRAFT_STEPS, ModelLayout, head_shape, output_head
from graphkit.models.pools import LayerGroupAttention, all_slots, slot_bytes
from graphkit.models.prepare import rotation_limit
from graphkit.models.tensor_parallel import RankSplit
from graphkit.ops.linear import has_row_invariant_products
from graphkit.spec import ForwardMode, SpecConfig
from graphkit.spec.config import default_spec

if TYPE_CHECKING:
    from graphkit.models.heads.draft_model import DraftModel

WITHOUT_DRAFT = ("NGRAM", "NONE")
"""Algorithms that need no draft model; the first one is the default."""
_SPEC_NAMES = {"MULTI_LAYER_EAGLE": "EAGLE"}
"""Name in ``SpecConfig`` of the algorithms that are a kind of another one."""


_DRAFTS_AT_ONCE = "NGRAM", "DFLASH", "MULTI_LAYER_EAGLE"
"""Algorithms whose drafts take the same time at every length, as long as they are chains."""

_SHARE_OF_FREE = 0.7
"""Share of the free memory of a GPU that the KV pools of an engine may take. Graphs, prefills and
buffers take the rest."""
_SLOTS_PER_REQUEST = 1024
"""KV slots per request on a CPU, which shares its memory with everything else."""


def check_algorithm(algorithm: object, allowed: Collection[str]) -> str:
    """Return the name of an algorithm in capitals.

    Raises:
        ConfigError: The name is not in ``allowed``.
    """
    expected = "the name of an algorithm, or None"
    require_type("gk.models.load", "algorithm", algorithm, str, expected)
    name = str(algorithm).upper()
    if name not in allowed:
        raise ConfigError(
            f"{name} needs a draft model of its kind. Load one, or use one of "
            f"{', '.join(allowed)}.",
            field="algorithm",
        )
    return name


class DraftedModel:
    """A prepared model and its draft model, and what they are over new pools.

    Base of ``TransformersModel``, which documents the attributes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        original: PreTrainedModel,
        layout: ModelLayout,
        folder: str | None = None,
        draft: DraftModel | None = None,
        algorithm: str | None = None,
        trust_remote_code: bool = False,
        split: RankSplit | None = None,
        row_invariant: bool = False,
    ) -> None:
        self.split, self.row_invariant = split, row_invariant
        self.model, self.original, self.layout, self.folder = model, original, layout, folder
        self.draft, self.trust_remote_code = draft, trust_remote_code
        default = self._algorithms[0]
        self.algorithm = (
            default if algorithm is None else check_algorithm(algorithm, self._algorithms)
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the weights."""
        return self.model.dtype

    @property
    def group(self) -> RankGroup | None:
        """The ranks that split the model, with which its engines and targets run."""
        return None if self.split is None else self.split.group

    @property
    def head(self) -> nn.Linear:
        """The module that computes the logits."""
        return output_head(self.model)

    @property
    def longest_context(self) -> int | None:
        """Positions of the model and its draft model; ``None`` without a limit.

        Those of LongRoPE are the ones with its initial frequencies.
        """
        configs = [model.config.get_text_config(decoder=True) for model in self._models]
        names = ("max_position_embeddings", "max_target_positions")  # the latter of Whisper
        limits = [getattr(config, name, None) for config in configs for name in names]
        limits += map(rotation_limit, self._models)
        return min((limit for limit in limits if limit is not None), default=None)

    def spec(
        self,
        algorithm: str | None = None,
        num_steps: int | Sequence[int] | None = None,
        topk: int = 1,
        num_draft_tokens: int | None = None,
        page_size: int = 1,
    ) -> SpecConfig:
        """Return the settings of an algorithm.

        Args:
            algorithm: An algorithm of the draft model, ``"NGRAM"`` or ``"NONE"``; ``None`` selects
                that of ``load``.
            num_steps: Draft steps, or several ascending numbers of them; see ``SpecConfig``.
                ``None`` selects 3, or one per MTP layer if there are fewer.
            topk: Branches per draft step: 1 drafts chains, more drafts trees.
            num_draft_tokens: Nodes per request in verify, the bonus token included; ``None``
                selects ``num_steps + 1`` for a chain and twice that for a tree.
            page_size: Slots per KV page.

        Raises:
            ConfigError: A setting is out of range, or the algorithm needs another draft model.
        """
        name = self.algorithm if algorithm is None else check_algorithm(algorithm, self._algorithms)
        if num_steps is None:
            num_steps = DRAFT_STEPS
            if self.draft is not None and name == self.draft.algorithm:
                num_steps = self.draft.num_steps
        return default_spec(
            _SPEC_NAMES.get(name, name),
            num_steps,
            topk,
            num_draft_tokens,
            page_size,
            linear_attention=bool(self.layout.recurrent),
        )

    def engine_spec(
        self,
        algorithm: str | None = None,
        topk: int = 1,
        num_draft_tokens: int | None = None,
        page_size: int = 1,
    ) -> SpecConfig:
        """Return the settings of an engine that chooses the draft length of each step.

        Its lengths are 0, 1 and that of ``spec``, without 1 if it has as many nodes as the longest,
        or if drafts of any length take the same time: then steps with fewer rows do better. There
        is one length, that of ``spec``, if a verify has one node, and with ranks that run no
        loops.

        Args:
            algorithm: As for ``spec``, like the next three.
            topk: Branches per draft step.
            num_draft_tokens: Nodes of the longest length.
            page_size: Slots per KV page.

        Raises:
            ConfigError: See ``spec``.
        """
        spec = self.spec(algorithm, None, topk, num_draft_tokens, page_size)
        longest, width = spec.num_steps, spec.num_draft_tokens
        has_loops = self.group is None or not self.group.no_loop_reason
        if not longest or width < 2 or not has_loops:
            return spec
        name = self.algorithm if algorithm is None else algorithm.upper()
        takes_steps = topk > 1 or name not in _DRAFTS_AT_ONCE
        has_short = takes_steps and longest > 1 and 1 + topk < width
        lengths = (0, 1, longest) if has_short else (0, longest)
        return self.spec(algorithm, lengths, topk, width, page_size)

    @property
    def _models(self) -> list[PreTrainedModel]:
        """The model, and its draft model if that is one of transformers."""
        modules = (self.model, None if self.draft is None else self.draft.module)
        return [module for module in modules if isinstance(module, PreTrainedModel)]

    @property
    def _algorithms(self) -> tuple[str, ...]:
        return (*(() if self.draft is None else (self.draft.algorithm,)), *WITHOUT_DRAFT)

    def _draft_of(self, spec: SpecConfig) -> DraftModel | None:
        """Return the draft model if an algorithm drafts with it."""
        return None if str(spec.resolved.name) in WITHOUT_DRAFT else self.draft

    def drafter(
        self,
        requests: ReqToTokenPool,
        spec: SpecConfig,
        slots: int | None = None,
        attention: type[PagedAttention] | None = None,
        target: EngineModel | None = None,
    ) -> Drafter | None:
        """Return the drafter of an algorithm over new KV pools, or over those of its target.

        ``None`` if the algorithm drafts nothing. Arguments as for ``engine_model``. ``target`` is
        what that returned: a Gemma 4 assistant reads its pools.

        Raises:
            ConfigError: An assistant has no ``target``.
        """
        draft = self._draft_of(spec)
        if draft is not None:
            return draft.drafter(
                draft.engine_model(requests, spec, slots=slots, attention=attention, target=target)
            )
        return NgramDrafter() if spec.num_steps else None

    def _context_len(self, requested: int | None, default: int) -> int:
        """Return the context length of an engine or target, at most ``longest_context``."""
        positions = self.longest_context or sys.maxsize
        if requested is None:
            return min(default, positions)
        require_int(type(self.model).__name__, "max_context_len", requested)
        if requested > positions:
            reason = f"the model has {positions} positions"
            if positions in map(rotation_limit, self._models):
                reason = (
                    f"LongRoPE keeps its frequencies for {positions} positions, and a later one "
                    "would change the text of all requests of its batch"
                )
            raise ConfigError(
                f"max_context_len is {requested}, but {reason}.",
                field="max_context_len",
            )
        return requested

    def sizes(self, max_batch_size: int, max_context_len: int, spec: SpecConfig) -> BufferSizes:
        """Return the sizes of the buffers of an engine or runner over these models."""
        vocab_size, hidden_size = head_shape(self.model)
        draft = self._draft_of(spec)
        aux_layers = () if draft is None else draft.aux_layers
        token_map = None if draft is None else draft.token_map
        return BufferSizes(
            max_batch_size, max_context_len, hidden_size, vocab_size, self.model.dtype,
            page_size=spec.page_size,
            spec_hidden_size=len(aux_layers) * hidden_size or None,
            draft_vocab_size=None if token_map is None else len(token_map),
        )  # fmt: skip

    def _kv_slots(
        self,
        requested: int | None,
        requests: ReqToTokenPool,
        spec: SpecConfig,
        kv_dtype: torch.dtype | None,
    ) -> int:
        """Return the KV slots of an engine, in whole pages; see ``engine``."""
        page_size = spec.page_size
        most = all_slots(requests, page_size)
        if requested is not None:
            require_int(type(self).__name__, "kv_slots", requested)
            return -(-requested // page_size) * page_size
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            room = int(_SHARE_OF_FREE * free) // self._slot_bytes(spec, kv_dtype)
            if self.split is not None:
                room = self.split.least(room)  # ranks decide alike which requests are preempted
        else:
            room = requests.size * _SLOTS_PER_REQUEST
        return min(most, max(room // page_size * page_size, most // requests.size))

    def _slot_bytes(self, spec: SpecConfig, kv_dtype: torch.dtype | None) -> int:
        """Return the bytes of a slot in the KV pools of an engine, of the draft model, too."""
        requests = ReqToTokenPool(1, spec.page_size, self.device)
        model, draft = self.engine_model(requests, spec, kv_dtype=kv_dtype), self._draft_of(spec)
        backends = [model.attention]
        if draft is not None:
            backends.append(draft.engine_model(requests, spec, target=model).attention)
        pools = {id(backend.kv_pool): backend for backend in backends}  # an assistant has none
        return max(1, sum(map(slot_bytes, pools.values())))

    def engine_model(
        self,
        requests: ReqToTokenPool,
        spec: SpecConfig,
        *,
        kv_dtype: torch.dtype | None = None,
        slots: int | None = None,
        attention: type[PagedAttention] | None = None,
    ) -> EngineModel:
        """Return the model over new KV pools, for a ``SpecStepRunner`` or an engine of your own.

        Args:
            requests: Slots of each request.
            spec: The drafting and verification settings.
            kv_dtype: See ``engine``.
            slots: KV slots; ``None`` selects those of every request at its longest.
            attention: See ``engine``.
        """
        backend = LayerGroupAttention(
            requests, self.layout.attention, spec.page_size, kv_dtype or self.model.dtype,
            self.layout.indexers, slots, attention, self.row_invariant,
        )  # fmt: skip
        width = spec.tokens_per_request(ForwardMode.TARGET_VERIFY)
        layers, states = self.layout.recurrent, None
        if layers:
            from graphkit.models.scans import state_pool

            states = state_pool(layers, requests.size, width, self.device)
        draft = self._draft_of(spec)
        aux_layers = () if draft is None else draft.aux_layers
        forward = TransformersForward(self.model, self.layout, backend, states, aux_layers)
        is_row_invariant = backend.is_row_invariant and not self._module_dependences()
        return EngineModel(forward, backend, states, is_row_invariant=is_row_invariant)

    def row_dependences(self) -> list[str]:
        """Return why the bits of a row may depend on the batch; empty if they do not.

        These are the reasons with the default attention backend.
        """
        reasons = self._module_dependences()
        if self.device.type != "cuda" and not self.row_invariant:
            reasons.append("attention runs by torch's function (row_invariant)")
        return reasons

    def _module_dependences(self) -> list[str]:
        """Return the reasons that do not depend on the attention backend."""
        reasons = list[str]()
        if self.device.type == "cuda" and not self.row_invariant:
            reasons.append(
                "attention, experts, products with quantised weights, and products of more than "
                "256 rows take the fastest way"
            )
        if not self.layout.replaced:
            reasons.append("its modules are not replaced (fuse)")
        if self.layout.torch_products:
            names = abbreviate(sorted(self.layout.torch_products))
            reasons.append(f"modules multiply by torch ({names})")
        if self.layout.indexers:
            reasons.append(f"{self.layout.indexers[0].name} selects keys by torch")
        if self.split is not None and self.split.group.size > 2:
            reasons.append(
                "collectives of many rows add the sums of ranks in an order of their own"
            )
        if not has_row_invariant_products(self.device, self.dtype):
            reasons.append(f"torch multiplies {self.dtype} on this device")
        return reasons
