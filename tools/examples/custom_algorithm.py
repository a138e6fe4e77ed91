"""A speculative algorithm of your own, end to end: its name, its width, its relay, its drafter.

COPY drafts by copying from the request's own text. As long as something is accepted it goes on
copying where it was, past the token that differed; else it looks for another place to copy from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import graphkit as gk
from graphkit import reference
from graphkit.attention import SdpaAttention, TritonAttention
from graphkit.engine import Drafter, DraftTree, EngineContext, EngineModel, Prefilled, Verified
from graphkit.kv import ReqToTokenPool
from graphkit.reference.engine import Pools

DRAFTS, CONTEXT, SAMPLING = 5, 160, gk.SamplingParams(max_new_tokens=48)
PROMPTS = ["import os\nimport re\nimport ", "    def __sub__(self, other):\n        return "]


class CountingFutureMap(gk.FutureMap):
    """Relays what steps leave for each other, and counts how many drafts they got accepted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps = torch.zeros(DRAFTS + 1, dtype=torch.int64, device=self.device)

    def stash(self, req_pool_indices: torch.Tensor, results: Mapping[str, torch.Tensor]) -> None:
        """Count on the device, since waiting for it would undo the overlap of steps."""
        super().stash(req_pool_indices, results)
        if "accepted" in results:
            self.steps.index_add_(0, results["accepted"], torch.ones_like(req_pool_indices))


class CopyAlgorithm(gk.CustomSpecAlgorithm):
    """num_draft_tokens counts drafts alone here, so verify has one row more for the bonus token."""

    def get_num_tokens_per_bs_for_target_verify(
        self, num_draft_tokens: int, is_draft_worker: bool
    ) -> int:
        """The width that graphs, buffers and metadata are made for."""
        return num_draft_tokens + (not is_draft_worker)

    def create_future_map(self, *args: Any) -> gk.FutureMap:
        """The engine makes one, and hands it to the drafter."""
        return CountingFutureMap(*args, self)


class CopyDrafter(Drafter):
    """Keeps the text of every request on the device. It runs no model, so it has no runners."""

    def prepare(self, context: EngineContext) -> None:
        """Called once, before anything else."""
        assert isinstance(context.future_map, CountingFutureMap), "the algorithm made it"
        self.relay, self.width = context.future_map, context.verify_width
        self.text = torch.zeros_like(context.req_to_token, dtype=torch.int64)
        self.node = torch.arange(self.width, device=context.device)

    @property
    def max_path(self) -> int:
        """A step may accept all drafts, and the bonus token."""
        return self.width

    def prefill(self, chunk: Prefilled) -> None:
        """Keep the prompt. There is no place yet that was copied from."""
        rows, end = chunk.req_pool_indices, chunk.start + len(chunk.input_ids)
        self.text[rows, chunk.start : end] = chunk.input_ids
        self.relay.stash(rows, {"source": torch.full_like(rows, -1)})

    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> DraftTree:
        """A chain: the bonus token, and what follows the place that is copied from."""
        rows, last = req_pool_indices, seq_lens.long()[:, None]
        self.text[rows, last[:, 0]] = bonus_tokens
        text, source = self.text[rows], self.relay.resolve("source", rows)[:, None]
        self.source = torch.where(source < 0, latest_copy(text, last), source)
        drafts = text.gather(1, torch.minimum(self.source + self.node, last))
        drafts[:, 0] = bonus_tokens
        child = torch.where(self.node + 1 < self.width, self.node + 1, -1)
        return DraftTree(
            draft_tokens=drafts.flatten(),
            positions=(last + self.node).flatten(),
            tree_mask=(self.node[:, None] >= self.node).repeat(len(rows), 1, 1),
            retrieve_index=torch.arange(drafts.numel(), device=drafts.device).view_as(drafts),
            retrieve_next_token=child.repeat(len(rows), 1),
            retrieve_next_sibling=torch.full_like(drafts, -1),
        )

    def extend(self, verified: Verified) -> None:
        """Append what was accepted, and say from where the next step is to copy."""
        rows, accepted = verified.req_pool_indices, verified.counts.num_accepted_drafts.long()
        places = verified.seq_lens.long()[:, None] + 1 + self.node
        self.text[rows[:, None], places] = verified.predict.view_as(places)
        source = torch.where(accepted > 0, self.source[:, 0] + accepted + 1, -1)
        self.relay.stash(rows, {"source": source, "accepted": accepted})

    def extend_accepted(self, verified: Verified, num_accepted_tokens: Sequence[int]) -> None:  # noqa: ARG002
        """v1, which waits for the host, asks here. Requests that have ended do not mind."""
        self.extend(verified)


def latest_copy(text: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The latest earlier place of the last token, best with the token before it too: [B, 1]."""
    places = torch.arange(text.shape[1], device=text.device)
    is_copy = (text == text.gather(1, last)) & (places < last)
    is_longer = text.roll(1, 1) == text.gather(1, last - 1)
    return (is_copy * (CONTEXT * (1 + is_longer) + places)).argmax(1, keepdim=True)


def engine_with(drafter: Drafter, device: torch.device) -> gk.SpeculativeEngine:
    """A target over its pools, a drafter, and their settings."""
    folder = reference.default_checkpoint()
    model = reference.load_checkpoint(folder, device=device, dtype=torch.float32)
    kind = TritonAttention if device.type == "cuda" else SdpaAttention
    requests = ReqToTokenPool(len(PROMPTS), CONTEXT, device)
    attention = Pools(requests, kind, 1, torch.float32).attention(model.config)
    return gk.SpeculativeEngine(
        EngineModel(reference.VerifyForward(model, attention), attention),
        drafter,
        spec=gk.SpecConfig("COPY", num_steps=DRAFTS, topk=1, num_draft_tokens=DRAFTS),
        sizes=gk.BufferSizes(len(PROMPTS), CONTEXT, model.config.hidden_size, 256, torch.float32),
        device=device,
    )


def main() -> int:
    """Run it captured, compare with plain decoding, and print what was accepted."""
    gk.register_algorithm("COPY", CopyAlgorithm)
    prompts, drafter = [reference.encode(prompt) for prompt in PROMPTS], CopyDrafter()
    with reference.reference_engine("NONE", max_context_len=CONTEXT) as plain:
        expected = [request.output_ids for request in plain.generate(prompts, SAMPLING)]
    with engine_with(drafter, plain.device) as engine:
        engine.capture()
        made = [request.output_ids for request in engine.generate(prompts, SAMPLING)]
        print(PROMPTS[1] + reference.decode(made[1]))
        lengths = drafter.relay.steps.tolist()
        print(f"{engine.stats.accept_length:.2f} tokens per step; by accepted drafts: {lengths}")
    return 0 if made == expected and not engine.stats.fallbacks else 1


if __name__ == "__main__":
    raise SystemExit(main())
