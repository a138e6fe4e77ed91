"""Verify draft chains with a captured graph, as one step of an engine does.

The drafts are the target's own tokens with one wrong token per request, so that the number of
accepted drafts is known.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import graphkit as gk
from graphkit.models.reference import reference_target

VERIFY = gk.ForwardMode.TARGET_VERIFY


def verify(
    runner: gk.TargetVerifyRunner, batch: gk.TargetVerifyInputs, drafts: torch.Tensor
) -> torch.Tensor:
    """Return the target's token after every row of a batch with these drafts, [B, W]."""
    output = runner.replay(replace(batch, input_ids=drafts.flatten()))
    return output.next_token_logits.argmax(-1).view_as(drafts).cpu()


def drafts_for(runner: gk.TargetVerifyRunner, batch: gk.TargetVerifyInputs) -> torch.Tensor:
    """Return the target's own chains with one wrong token, [B, W]; every W-th has none."""
    width = runner.tokens_per_request
    drafts = torch.as_tensor(batch.input_ids).view(-1, width)
    for node in range(1, width):
        drafts[:, node] = verify(runner, batch, drafts)[:, node - 1]
    for request, chain in enumerate(drafts):
        chain[1 + request % width :] ^= 1
    return drafts


def accepted_drafts(chosen: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Count the leading drafts that equal the target's own tokens: [B, W], [B, W] to [B]."""
    return (chosen[:, :-1] == drafts[:, 1:]).long().cumprod(1).sum(1)


def main() -> int:
    """Replay three batches of different sizes and print the accepted drafts of each request."""
    torch.set_num_threads(1)  # on the CPU, operations of a small model are too short for more
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = reference_target(device)
    with target.runner(VERIFY, device=device) as runner:
        runner.capture()
        for requests in (3, 8, 1):
            batch = target.batch(VERIFY, requests, requests)
            drafts = drafts_for(runner, batch)
            accepted = accepted_drafts(verify(runner, batch, drafts), drafts).tolist()
            print(f"batch of {requests}, size {runner.table.fit(requests)}: accepted {accepted}")
        print(runner.stats)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
