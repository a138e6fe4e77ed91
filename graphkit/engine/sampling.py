"""Choosing tokens: the likeliest, or by the target's distribution."""

from __future__ import annotations

import torch


def target_distribution(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The distribution that each row's token is to follow.

    Shapes:
        logits: [rows, V]. temperatures: [rows] float32; 0 puts all weight on the likeliest token.
        result: [rows, V] float32.
    """
    is_greedy = (temperatures == 0)[:, None]
    # From the likeliest down: then what a cold temperature sends out of float32 has no weight.
    behind = logits.float() - logits.amax(-1, keepdim=True).float()
    scaled = behind / torch.where(is_greedy, 1.0, temperatures[:, None])
    likeliest = torch.zeros_like(scaled).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(is_greedy, likeliest, scaled.softmax(-1))


def choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """One token per row, int64 [rows], all at one temperature. Never synchronises."""
    if temperature == 0:
        return logits.argmax(-1)
    temperatures = logits.new_full(logits.shape[:1], temperature, dtype=torch.float32)
    probs = target_distribution(logits, temperatures)
    # The largest of p / Exp(1) is a draw from p; multinomial would make the host wait.
    noise = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / noise).argmax(-1)
