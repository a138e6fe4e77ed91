"""Training of small targets of transformers and of draft models, for seconds, on the same text.

Shape letters: B windows, L tokens of each, T = B x L rows, H hidden, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from causal_attention import run_head
from graphkit.models.heads.layers import HeadSources
from graphkit.models.heads.mtp import MtpHead
from graphkit.models.running import AttentionCall, attending

LENGTH, WINDOWS, STEPS, RATE = 36, 8, 80, 4e-3
SENTENCES = [
    torch.randint(128, (12,), generator=torch.Generator().manual_seed(seed)) for seed in range(16)
]
"""The language: sentences in random order."""
Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Runs a head over ids, features and positions [B, L, ...]; returns hidden states and logits."""


def windows(generator: torch.Generator) -> Tensor:
    """Return windows of random sentences, [B, L + 2]."""
    order = torch.randint(len(SENTENCES), (WINDOWS, LENGTH // 12 + 2), generator=generator)
    text = torch.stack([torch.cat([SENTENCES[i] for i in row]) for row in order.tolist()])
    return text[:, : LENGTH + 2]


def minimise(weights: Iterable[nn.Parameter], steps: int, loss: Callable[[Tensor], Tensor]) -> None:
    """Minimise a loss over windows."""
    generator, trained = torch.Generator().manual_seed(0), list(weights)
    optimiser = torch.optim.AdamW([weight.requires_grad_() for weight in trained], lr=RATE)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(windows(generator)).backward()
        optimiser.step()
    for weight in trained:
        weight.requires_grad_(False)


def trained(model: Any, steps: int = STEPS) -> Any:
    """Train a language model, and return it."""

    def loss(ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    minimise(model.parameters(), steps, loss)
    return model.eval()


def head_sources(model: Any) -> Any:
    """Return what heads use of a model."""
    return HeadSources(model.get_input_embeddings(), model.lm_head, model.config.num_hidden_layers)


def train_head(
    model: Any, own: Iterable[nn.Parameter], run: Run, layers: tuple[int, ...], steps: int = STEPS
) -> None:
    """Train a draft head to predict what follows the next token.

    Args:
        model: The target, as transformers runs it.
        own: The weights of the head that are not the target's.
        run: Runs the head.
        layers: Layers whose inputs are the features; empty for the rows of the output head.
    """

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            states = model(ids[:, :LENGTH], output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in layers], -1) if layers else states[-1]
        positions = torch.arange(LENGTH).expand(WINDOWS, -1)
        hidden, logits = run(ids[:, 1:-1], features, positions)
        first = cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
        # The second draft step reads the head's hidden states instead of the target's.
        _, logits = run(ids[:, 2:], hidden, positions + 1)
        return first + cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 3:].flatten())

    minimise(own, steps, loss)


def train_assistant(target: Any, assistant: Any) -> Any:
    """Train an assistant of Gemma 4 on the keys and values of its target, and return it."""
    length = torch.arange(LENGTH)
    distance = length[:, None] - length
    window = assistant.config.text_config.sliding_window
    seen = {
        "full_attention": distance >= 0,
        "sliding_attention": (distance >= 0) & (distance <= window),
    }
    lowest = torch.finfo(torch.float32).min
    masks = {
        kind: torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~rows, lowest)
        for kind, rows in seen.items()
    }

    def loss(ids: Tensor) -> Tensor:
        options = {"output_hidden_states": True, "return_shared_kv_states": True}
        with torch.no_grad():
            out = target(ids[:, :LENGTH], use_cache=False, **options)
            embedded = target.get_input_embeddings()(ids[:, 1:])
        keys = dict(out.shared_kv_states.items())
        hidden, total = out.hidden_states[-1], torch.zeros(())
        for step in range(2):  # the second draft reads the hidden state of the first
            rows = torch.cat([embedded[:, step : step + LENGTH - 1], hidden[:, : LENGTH - 1]], -1)
            rows = assistant.pre_projection(nn.functional.pad(rows, (0, 0, 0, 1)))
            states = assistant.model(
                inputs_embeds=rows, attention_mask=masks, position_ids=length[None] + 1,
                shared_kv_states=keys, use_cache=False, logits_to_keep=None,
            ).last_hidden_state  # fmt: skip
            hidden = assistant.post_projection(states)
            logits = assistant.lm_head(states[:, : LENGTH - 2])
            wanted = ids[:, 2 + step : LENGTH + step]
            total = total + cross_entropy(logits.flatten(0, 1), wanted.flatten())
        return total

    minimise(assistant.parameters(), STEPS, loss)
    return assistant


def head_run(head: Any) -> Run:
    """Return what runs an EAGLE or EAGLE-3 head of graphkit over whole windows."""

    def attend(_: int, *parts: Tensor) -> Tensor:
        query, key, value = (part.unflatten(0, (WINDOWS, -1)).transpose(1, 2) for part in parts)
        return causal(query, key, value).transpose(1, 2).flatten(0, 1)

    def run(ids: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = ids.flatten(), features.flatten(0, 1), positions.flatten()
        hidden = run_head(head, *rows, attend)
        return hidden.unflatten(0, ids.shape), head.logits(hidden).unflatten(0, ids.shape)

    return run


def mtp_run(head: MtpHead) -> Run:
    """Return what runs the first MTP layer over whole windows."""

    def attend(call: AttentionCall) -> Tensor:
        call = call.expanded()
        parts = (call.query, call.key, call.value)
        query, key, value = (part[0].unflatten(1, (WINDOWS, -1)).transpose(0, 1) for part in parts)
        out = causal(query, key, value, scale=call.scaling)
        return out.transpose(1, 2).flatten(0, 1)[None]

    def run(ids: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        with attending(attend, positions.flatten()):
            hidden = head(0, ids.flatten(), features.flatten(0, 1), positions.flatten())
        return hidden.unflatten(0, ids.shape), head.logits(hidden).unflatten(0, ids.shape)

    return run


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Attend to earlier rows, [B, N, L, D]."""
    return scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
