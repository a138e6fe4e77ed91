"""Training losses, and measurements on held-out text.

Shape letters: B windows, L = CONTEXT tokens of each, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, smooth_l1_loss

from graphkit.models import TransformersModel
from training.unroll import STEPS, Draft

FEATURE_WEIGHT = 0.1

Unroll = Callable[[nn.Module, Tensor, Tensor], Iterator[Draft]]


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss in nats over windows [B, L + 1], each token given those before it."""
    logits = model(windows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def held_out_bits(model: nn.Module, windows: tuple[Tensor, ...]) -> float:
    """Return bits per byte over batches of windows [B, L + 1]."""
    with torch.no_grad():
        total = torch.stack([next_token_loss(model, part) * len(part) for part in windows]).sum()
    return total.item() / sum(map(len, windows)) / math.log(2)


def target_features(
    target: TransformersModel, ids: Tensor, layers: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Return the target's features [B, L, H] and its logits [B, L, V] for ids [B, L].

    With ``layers``, the features are the inputs of these layers, [B, L, layers x H].
    """
    streams: list[Tensor] = []
    decoder = target.original.get_decoder()
    hook = decoder.norm.register_forward_pre_hook(lambda _module, args: streams.append(args[0]))
    try:
        out = target.original(ids, use_cache=False, output_hidden_states=True)
    finally:
        hook.remove()
    streams = [*out.hidden_states[:-1], *streams]  # the last one is before the norm
    features = [streams[layer] for layer in layers] or [out.hidden_states[-1]]
    return torch.cat(features, -1), out.logits


def draft_loss(
    unroll: Unroll,
    head: nn.Module,
    target: TransformersModel,
    windows: Tensor,
    layers: Sequence[int] = (),
) -> Tensor:
    """Return the mean loss of the S draft steps over windows [B, L + 1].

    The loss of a step is the cross entropy with the target's distribution, over the tokens that the
    head can draft. For EAGLE a tenth of the smooth L1 distance of its hidden states from the
    target's features is added; arXiv 2401.15077 has the same terms with the weights exchanged.
    EAGLE-3 has no such term (arXiv 2503.01840). ``layers`` is as for ``target_features``.
    """
    ids = windows[:, :-1]
    features, logits = target_features(target, ids, layers)
    losses = []
    for step, draft in enumerate(unroll(head, ids, features), 1):
        known = logits if draft.tokens is None else logits[..., draft.tokens]
        wanted = draft.at_roots(known, step).float().softmax(-1)
        loss = cross_entropy(draft.logits.float().flatten(0, 1), wanted.flatten(0, 1))
        losses.append(draft.weight * loss)
        if draft.hidden is not None:
            feature = draft.at_roots(features, step)
            losses.append(FEATURE_WEIGHT * smooth_l1_loss(draft.hidden.float(), feature.float()))
    return torch.stack(losses).sum() / STEPS


def accept_rates(
    unroll: Unroll,
    head: nn.Module,
    target: TransformersModel,
    windows: tuple[Tensor, ...],
    layers: Sequence[int] = (),
) -> list[float]:
    """Return how often each draft step's best token equals the target's, given the true prefix.

    A step that does not read the text has the true prefix where the drafts before it equal it.
    """
    hits: dict[int, Tensor] = {}
    counted: dict[int, Tensor] = {}
    with torch.no_grad():
        for part in windows:
            ids, text = part[:, :-1], part[:, 1:]
            features, logits = target_features(target, ids, layers)
            choice, is_true = logits.argmax(-1), torch.ones((), dtype=torch.bool)
            for step, draft in enumerate(unroll(head, ids, features), 1):
                best = best_tokens(draft)
                has_prefix = is_true.to(best.device).expand_as(best)
                is_hit = best.eq(draft.at_roots(choice, step)) & has_prefix
                hits[step] = hits.get(step, 0) + is_hit.sum()
                counted[step] = counted.get(step, 0) + has_prefix.sum()
                if not draft.reads_text:
                    is_true = has_prefix & best.eq(draft.at_roots(text, step))
    return [round((hits[step] / counted[step].clamp(min=1)).item(), 4) for step in hits]


def best_tokens(draft: Draft) -> Tensor:
    """Return the best token of each root in the target's vocabulary, [B, R]."""
    best = draft.logits.argmax(-1)
    return best if draft.tokens is None else draft.tokens[best]


def accept_length(rates: list[float]) -> float:
    """Estimate the tokens per verify step, bonus included: 1 + a1 + a1 * a2 + ..."""
    return 1 + sum(accumulate(rates, mul))
