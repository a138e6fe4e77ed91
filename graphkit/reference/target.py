"""The reference model as a capture target: what ``graphkit capture`` works on by default."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.attention import PagedAttention, SdpaAttention, TritonAttention
from graphkit.buffers import TargetVerifyInputs
from graphkit.config import BufferSizes
from graphkit.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.reference.checkpoint import default_checkpoint, load_checkpoint
from graphkit.reference.forwards import VerifyForward
from graphkit.reference.model import LlamaModel, causal_attend
from graphkit.reference.tokenizer import encode
from graphkit.spec import ForwardMode, SpecConfig
from graphkit.targets import CaptureTarget

CONTEXT = 128
_SHORTEST_PREFIX = 8


def reference_target(
    device: str = "cpu",
    *,
    topk: int = 1,
    max_batch_size: int | None = None,
    checkpoint: str | Path | None = None,
    attention: type[PagedAttention] | None = None,
) -> CaptureTarget:
    """A Llama-layout model in the middle of decoding real text, to verify drafts of it.

    Args:
        device: ``cpu``, where the model runs in float32, or a CUDA device, in bfloat16.
        topk: 1 verifies chains of 4 tokens, more verifies random trees of 8.
        max_batch_size: Requests; ``None`` makes 64 on CUDA and 8 elsewhere.
        checkpoint: Any local Llama, Qwen2 or Qwen3 folder; ``None`` takes the one that ships.
        attention: Backend; ``None`` takes Triton on CUDA, torch elsewhere.

    Raises:
        CheckpointError: The folder cannot be loaded.
    """
    is_cuda = torch.device(device).type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    model = load_checkpoint(checkpoint or default_checkpoint(), device=device, dtype=dtype)
    backend = attention or (TritonAttention if is_cuda else SdpaAttention)
    requests = _Requests(model, max_batch_size or (64 if is_cuda else 8), backend)
    steps, width = (3, 4) if topk == 1 else (4, 8)
    return CaptureTarget(
        name=f"reference {Path(checkpoint).name if checkpoint else 'model'}",
        spec=SpecConfig("EAGLE", num_steps=steps, topk=topk, num_draft_tokens=width),
        sizes=BufferSizes(
            max_batch_size=requests.count,
            max_context_len=CONTEXT,
            hidden_size=model.config.hidden_size,
            vocab_size=model.config.vocab_size,
            dtype=dtype,
        ),
        forwards=dict.fromkeys(
            (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE), VerifyForward(model, requests.backend)
        ),
        sample_batch=lambda mode, batch_size, seed: requests.sample(
            batch_size, 1 if mode.is_decode() else width, topk, seed
        ),
        weights=model,
        state=requests.kv_pool.tensors(),
        attention=requests.backend,
        batch_sizes=None if is_cuda or max_batch_size else (1, 2, 4, 8),
    )


def tree_target(device: str = "cpu") -> CaptureTarget:
    """``reference_target`` with trees of 8 tokens instead of chains of 4."""
    return reference_target(device, topk=2)


class _Requests:
    """Requests in the middle of a text, their prefixes in the KV pool."""

    def __init__(self, model: LlamaModel, count: int, backend: type[PagedAttention]) -> None:
        config, weight = model.config, model.lm_head.weight
        self.count = count
        self.req_to_token = ReqToTokenPool(count, CONTEXT, weight.device)
        self.kv_pool = MHATokenToKVPool(
            count * CONTEXT, 1, weight.dtype, config.num_key_value_heads, config.head_dim,
            config.num_hidden_layers, weight.device,
        )  # fmt: skip
        self.backend = backend(self.req_to_token, self.kv_pool)
        self.rows = np.array(self.req_to_token.alloc(count))
        self.slots = 1 + np.arange(count * CONTEXT).reshape(count, CONTEXT)
        self.req_to_token.req_to_token[torch.from_numpy(self.rows)] = torch.from_numpy(
            self.slots
        ).to(self.req_to_token.req_to_token)
        text = np.array(encode(inspect.getsource(textwrap)))
        self.lengths = _SHORTEST_PREFIX + np.arange(count) * 29 % (CONTEXT - 2 * _SHORTEST_PREFIX)
        self.texts = [text[37 * i : 37 * i + CONTEXT] for i in range(count)]
        for request in range(count):
            self._prefill(model, request)

    def _prefill(self, model: LlamaModel, request: int) -> None:
        length = int(self.lengths[request])
        device = model.lm_head.weight.device
        slots = torch.from_numpy(self.slots[request, :length]).to(device)
        causal = causal_attend(1, length)

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            self.kv_pool.set_kv_buffer(layer, slots, key, value)
            return causal(layer, query, key, value)

        ids = torch.from_numpy(self.texts[request][:length]).to(device)
        with torch.no_grad():
            model(ids, torch.arange(length, device=device), attend)

    def sample(self, batch_size: int, width: int, topk: int, seed: int) -> TargetVerifyInputs:
        """A batch of random requests, each with ``width`` tokens after its prefix.

        Half of them continue the text, as good drafts do; the others are random bytes.
        """
        random = np.random.default_rng([seed, batch_size, width])
        chosen = random.permutation(self.count)[:batch_size]
        lengths = self.lengths[chosen]
        place = lengths[:, None] + np.arange(width)
        drafts = np.stack([self.texts[c][p] for c, p in zip(chosen, place, strict=True)])
        is_guess = random.random(drafts.shape) < 0.5
        is_guess[:, 0] = False  # the root is the target's own token
        drafts = np.where(is_guess, random.integers(0, 128, drafts.shape), drafts)
        tree = topk > 1 and width > 1
        mask, depth = random_trees(batch_size, width, random) if tree else (None, np.arange(width))
        return TargetVerifyInputs(
            req_pool_indices=self.rows[chosen],
            seq_lens=lengths.astype(np.int32),
            input_ids=drafts.ravel(),
            positions=(lengths[:, None] + depth).ravel(),
            out_cache_loc=np.take_along_axis(self.slots[chosen], place, 1).ravel(),
            custom_mask=mask,
        )


def random_trees(
    count: int, width: int, random: np.random.Generator
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Trees whose every node hangs on an earlier one: mask bool [B, W, W] and depth int64 [B, W].

    mask[b, i, j] says that node i sees node j: j is i or one of its ancestors.
    """
    mask = np.zeros((count, width, width), dtype=np.bool_)
    depth = np.zeros((count, width), dtype=np.int64)
    each = np.arange(count)
    mask[:, 0, 0] = True
    for node in range(1, width):
        parent = random.integers(0, node, count)
        mask[:, node] = mask[each, parent]
        mask[:, node, node] = True
        depth[:, node] = depth[each, parent] + 1
    return mask, depth
