"""Verify drafts with a captured graph: what an engine's step does with the runner.

The drafts are the text's own next tokens with a wrong one put in, so it shows what acceptance sees.
"""

from __future__ import annotations

import torch

import graphkit as gk
from graphkit.reference import reference_target

VERIFY = gk.ForwardMode.TARGET_VERIFY


def accepted_drafts(logits: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Drafts that the target would have chosen itself, per request: [B, W, V], [B, W] to [B]."""
    chosen = logits.argmax(-1)[:, :-1]
    return (chosen == drafts[:, 1:]).long().cumprod(1).sum(1)


def main() -> int:
    """Replay three batches of different sizes and print how many drafts each request keeps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = reference_target(device)
    with target.runner(VERIFY, device=device) as runner:
        runner.capture()
        for requests in (3, 8, 1):
            batch = target.sample_batch(VERIFY, requests, requests)
            logits = runner.replay(batch).next_token_logits.cpu()
            width = runner.tokens_per_request
            drafts = torch.as_tensor(batch.input_ids).view(requests, width)
            kept = accepted_drafts(logits.view(requests, width, -1), drafts)
            print(f"{requests} requests at size {runner.table.fit(requests)}: kept {kept.tolist()}")
        print(runner.stats)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
