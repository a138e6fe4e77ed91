"""Medusa heads (arXiv 2401.10774) in a graph of their own, driven by a ``Drafter``.

The heads are a step that is none of the forward modes: they read one hidden state and one token per
request, and return the candidates of S positions. ``StepRunner`` captures them from the declaration
of their inputs and outputs. The target verifies the drafts in its own graph.
"""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass

import torch

import graphkit as gk
from graphkit.models import TransformersModel, reference_engine, reference_model
from graphkit.models.tokenizer import decode, encode

HEADS, CONTEXT, SAMPLING = 3, 160, gk.SamplingParams(max_new_tokens=48)
PROMPTS = ["import os\nimport re\nimport ", "    def __sub__(self, other):\n        return "]


@dataclass(kw_only=True, eq=False)
class HeadInputs(gk.StepInputs):
    """Inputs of the heads: one row per request."""

    hidden_states: gk.Rows = gk.declare(
        gk.Axis.REQUEST, gk.MODEL_DTYPE, "of the last accepted row", row=("H",), by_address=True
    )
    bonus_tokens: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.int64, "the token after that row")


@dataclass(kw_only=True, eq=False)
class HeadOutput(gk.Output):
    """Best token of each head, [B, S] int64."""

    draft_tokens: torch.Tensor = gk.declare_output(gk.Axis.REQUEST, torch.int64, row=("S",))


class MedusaHeads(torch.nn.Module):
    """S linear heads over the hidden state and the bonus token; head i skips i + 1 tokens.

    Args:
        model: The target; its hidden states of ``text`` are the training data.
        text: Training text.
    """

    def __init__(self, model: TransformersModel, text: str) -> None:
        super().__init__()
        weight = model.head.weight
        ids = torch.tensor(encode(text), device=weight.device)
        ids = ids[: len(ids) // 128 * 128].view(-1, 128)
        with torch.no_grad():
            hidden = model.original.get_decoder()(ids).last_hidden_state
        rows = hidden[:, : -HEADS - 1].flatten(0, 1).float()
        token = torch.nn.functional.one_hot(ids[:, 1:-HEADS].flatten(), len(weight)).float()
        features = torch.cat([rows, token], 1)
        gram = features.T @ features + 10 * torch.eye(features.shape[1], device=ids.device)
        heads = []
        for skip in range(HEADS):  # ridge regression, in closed form
            target = ids[:, 2 + skip : 128 - HEADS + 1 + skip].flatten()
            wanted = torch.nn.functional.one_hot(target, len(weight)).float()
            heads.append(torch.linalg.solve(gram, features.T @ wanted))
        stacked = torch.stack(heads).to(weight.dtype)
        self.hidden_weight = torch.nn.Parameter(stacked[:, : rows.shape[1]], requires_grad=False)
        self.token_weight = torch.nn.Parameter(stacked[:, rows.shape[1] :], requires_grad=False)

    def forward(self, inputs: HeadInputs) -> HeadOutput:
        """Return the best token of each head."""
        scores = torch.einsum("bh,shv->bsv", inputs.hidden_states, self.hidden_weight)
        scores = scores + self.token_weight[:, inputs.bonus_tokens].transpose(0, 1)
        return HeadOutput(draft_tokens=scores.argmax(-1))


class MedusaDrafter(gk.Drafter):
    """Drafts a chain of S tokens with one replay of the heads.

    Args:
        heads: The trained heads.
    """

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads

    def prepare(self, context: gk.EngineContext) -> None:
        """Create the runner. The engine captures and closes it."""
        self._context, self._spec = context, context.spec
        runner = gk.StepRunner(
            self._heads,
            inputs=HeadInputs,
            output=HeadOutput,
            spec=context.spec,
            sizes=context.sizes,
            **context.runner_options,
        )
        self._runner, self.runners = runner, (runner,)
        chain = torch.arange(HEADS, device=context.device)
        self._parents, self._nodes = chain - 1, chain

    @property
    def max_path(self) -> int:
        """All drafts and the bonus token."""
        return HEADS + 1

    def prefill(self, chunk: gk.PrefillChunk) -> None:
        """Keep the hidden state of the prompt's last token."""
        if chunk.is_last and chunk.hidden_states is not None:
            last = {"head_states": chunk.hidden_states[-1:]}
            self._context.future_map.stash(chunk.req_pool_indices, last)

    def draft(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, bonus_tokens: torch.Tensor
    ) -> gk.DraftTree:
        """Replay the heads and link their tokens to a chain."""
        hidden = self._context.future_map.resolve("head_states", req_pool_indices)
        drafts = self._runner.run(HeadInputs(hidden_states=hidden, bonus_tokens=bonus_tokens))
        requests = len(seq_lens)
        candidates = {
            "parent_list": self._parents.repeat(requests, 1),
            "top_scores_index": self._nodes.repeat(requests, 1),
            "draft_tokens": drafts.draft_tokens,
        }
        return gk.DraftTree.from_candidates(bonus_tokens, candidates, seq_lens, self._spec)

    def extend(self, verified: gk.Verified) -> None:
        """Keep the hidden state of each request's last accepted row."""
        assert verified.hidden_states is not None, "the target returns hidden states"
        rows = verified.hidden_states.unflatten(0, (len(verified.seq_lens), -1))
        last = verified.counts.num_accepted_drafts.long()[:, None, None]
        states = rows.gather(1, last.expand(-1, 1, rows.shape[2]))[:, 0]
        self._context.future_map.stash(verified.req_pool_indices, {"head_states": states})


class MedusaAlgorithm(gk.CustomSpecAlgorithm):
    """Chains of S drafts and the bonus token."""


def engine_with_heads(device: torch.device) -> gk.SpeculativeEngine:
    """Create an engine over the reference model and heads trained on the source of argparse."""
    model, spec = (
        reference_model("NONE", device=device),
        gk.SpecConfig("MEDUSA", HEADS, 1, HEADS + 1),
    )
    requests = gk.ReqToTokenPool(len(PROMPTS), CONTEXT, device)
    return gk.SpeculativeEngine(
        model.engine_model(requests, spec),
        MedusaDrafter(MedusaHeads(model, inspect.getsource(argparse)[:12_000])),
        spec=spec,
        sizes=model.sizes(len(PROMPTS), CONTEXT, spec),
        device=device,
    )


def main() -> int:
    """Generate with captured graphs, compare with plain decoding, and print the acceptance."""
    gk.register_algorithm("MEDUSA", MedusaAlgorithm)
    prompts = [encode(prompt) for prompt in PROMPTS]
    with reference_engine("NONE", max_context_len=CONTEXT) as plain:
        expected = [request.output_ids for request in plain.generate(prompts, SAMPLING)]
    with engine_with_heads(plain.device) as engine:
        engine.capture()
        output = [request.output_ids for request in engine.generate(prompts, SAMPLING)]
        print(PROMPTS[1] + decode(output[1]))
        print(f"{engine.stats.accept_length:.2f} tokens per step")
    return 0 if output == expected and not engine.stats.fallbacks else 1


if __name__ == "__main__":
    raise SystemExit(main())
