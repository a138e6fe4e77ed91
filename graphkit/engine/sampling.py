"""Token selection: greedy, or from the target's distribution."""

from __future__ import annotations

import torch


def target_distribution(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return the distribution from which each row's token is drawn.

    Shapes:
        logits: [rows, V].
        temperatures: [rows] float32; 0 puts all probability on the most probable token.
        result: [rows, V] float32.
    """
    is_greedy = (temperatures == 0)[:, None]
    # Relative to the largest logit, overflow at low temperatures yields -inf: probability 0.
    behind = logits.float() - logits.amax(-1, keepdim=True).float()
    scaled = behind / torch.where(is_greedy, 1.0, temperatures[:, None])
    greedy = torch.zeros_like(scaled).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(is_greedy, greedy, scaled.softmax(-1))


def sample_tokens(
    logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> torch.Tensor:
    """Select one token per row at one temperature, int64 [rows]. Never synchronises."""
    if temperature == 0:
        return logits.argmax(-1)
    temperatures = logits.new_full(logits.shape[:1], temperature, dtype=torch.float32)
    probs = target_distribution(logits, temperatures)
    # argmax(p / Exp(1)) is a draw from p; torch.multinomial would make the host wait.
    noise = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / noise).argmax(-1)
