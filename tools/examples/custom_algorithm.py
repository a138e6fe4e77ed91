"""A custom speculative algorithm: its name, its verify width, its future map and its drafter.

COPY drafts tokens by copying from the request's own text. While drafts are accepted, it continues
copying after the token that differed. Otherwise it looks up a new position to copy from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import graphkit as gk
from graphkit.engine import Drafter, DraftTree, EngineContext, PrefillChunk, Verified
from graphkit.engine.kv import ReqToTokenPool
from graphkit.models import reference_engine, reference_model
from graphkit.models.tokenizer import decode, encode

DRAFTS, CONTEXT, SAMPLING = 5, 160, gk.SamplingParams(max_new_tokens=48)
PROMPTS = ["import os\nimport re\nimport ", "    def __sub__(self, other):\n        return "]


class CountingFutureMap(gk.FutureMap):
    """Future map that also counts verify steps by their number of accepted drafts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps = torch.zeros(DRAFTS + 1, dtype=torch.int64, device=self.device)

    def stash(self, req_pool_indices: torch.Tensor, results: Mapping[str, torch.Tensor]) -> None:
        """Store results; count on the device, because waiting for it would prevent overlap."""
        super().stash(req_pool_indices, results)
        if "accepted" in results:
            self.steps.index_add_(0, results["accepted"], torch.ones_like(req_pool_indices))


class CopyAlgorithm(gk.CustomSpecAlgorithm):
    """Algorithm whose num_draft_tokens excludes the bonus token, which verify adds."""

    def get_num_tokens_per_bs_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        """Return the rows per request that graphs, buffers and metadata are created for."""
        return num_draft_tokens + (not is_draft_worker)

    def create_future_map(self, *args: Any) -> gk.FutureMap:
        """Return the future map that the engine passes to the drafter."""
        return CountingFutureMap(*args, self)


class CopyDrafter(Drafter):
    """Keeps the text of every request on the device. Runs no model, so it has no runners."""

    def prepare(self, context: EngineContext) -> None:
        """Allocate buffers. The engine calls this once, before any other method."""
        assert isinstance(context.future_map, CountingFutureMap), "CopyAlgorithm creates it"
        self.future_map, self.width = context.future_map, context.verify_width
        self.text = torch.zeros_like(context.req_to_token, dtype=torch.int64)
        self.node = torch.arange(self.width, device=context.device)

    @property
    def max_path(self) -> int:
        """All drafts and the bonus token."""
        return self.width

    def prefill(self, chunk: PrefillChunk) -> None:
        """Store the prompt's tokens. No position to copy from is known yet."""
        rows, end = chunk.req_pool_indices, chunk.start + len(chunk.input_ids)
        self.text[rows, chunk.start : end] = chunk.input_ids
        self.future_map.stash(rows, {"source": torch.full_like(rows, -1)})

    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> DraftTree:
        """Return chains of the bonus token and the tokens after the position to copy from."""
        rows, last = req_pool_indices, seq_lens.long()[:, None]
        self.text[rows, last[:, 0]] = bonus_tokens
        text, source = self.text[rows], self.future_map.resolve("source", rows)[:, None]
        self.source = torch.where(source < 0, latest_copy(text, last), source)
        drafts = text.gather(1, torch.minimum(self.source + self.node, last))
        drafts[:, 0] = bonus_tokens
        child = torch.where(self.node + 1 < self.width, self.node + 1, -1)
        return DraftTree(
            draft_tokens=drafts.flatten(),
            tree_mask=(self.node[:, None] >= self.node).repeat(len(rows), 1, 1),
            retrieve_next_token=child.repeat(len(rows), 1),
            retrieve_next_sibling=torch.full_like(drafts, -1),
        )

    def extend(self, verified: Verified) -> None:
        """Append the accepted tokens and store the position that the next step copies from."""
        rows, accepted = verified.req_pool_indices, verified.counts.num_accepted_drafts.long()
        columns = verified.seq_lens.long()[:, None] + 1 + self.node
        self.text[rows[:, None], columns] = verified.predict.view_as(columns)
        source = torch.where(accepted > 0, self.source[:, 0] + accepted + 1, -1)
        self.future_map.stash(rows, {"source": source, "accepted": accepted})


def latest_copy(text: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the latest earlier position of the last token, [B, 1]; prefer two equal tokens."""
    positions = torch.arange(text.shape[1], device=text.device)
    is_copy = (text == text.gather(1, last)) & (positions < last)
    is_longer = text.roll(1, 1) == text.gather(1, last - 1)
    return (is_copy * (CONTEXT * (1 + is_longer) + positions)).argmax(1, keepdim=True)


def engine_with(drafter: Drafter, device: torch.device) -> gk.SpeculativeEngine:
    """Create an engine from the reference model, its KV pool and a drafter."""
    model = reference_model("NONE", device=device)
    spec = gk.SpecConfig("COPY", num_steps=DRAFTS, topk=1, num_draft_tokens=DRAFTS)
    requests = ReqToTokenPool(len(PROMPTS), CONTEXT, device)
    return gk.SpeculativeEngine(
        model.engine_model(requests, spec),
        drafter,
        spec=spec,
        sizes=model.sizes(len(PROMPTS), CONTEXT, spec),
        device=device,
    )


def main() -> int:
    """Generate with captured graphs, compare with plain decoding, and print the acceptance."""
    gk.register_algorithm("COPY", CopyAlgorithm)
    prompts, drafter = [encode(prompt) for prompt in PROMPTS], CopyDrafter()
    with reference_engine("NONE", max_context_len=CONTEXT) as plain:
        expected = [request.output_ids for request in plain.generate(prompts, SAMPLING)]
    with engine_with(drafter, plain.device) as engine:
        engine.capture()
        output = [request.output_ids for request in engine.generate(prompts, SAMPLING)]
        print(PROMPTS[1] + decode(output[1]))
        steps = drafter.future_map.steps.tolist()
        print(
            f"{engine.stats.accept_length:.2f} tokens per step; steps by accepted drafts: {steps}"
        )
    return 0 if output == expected and not engine.stats.fallbacks else 1


if __name__ == "__main__":
    raise SystemExit(main())
