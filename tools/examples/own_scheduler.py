"""An engine with its own queue around the whole speculative step: no ``SpeculativeEngine``.

The scheduler owns rows and KV slots. ``SpecStepRunner`` drafts, verifies, accepts and loops on the
device, and reports each step while the loop runs. Any ``EngineModel`` and ``Drafter`` may take the
places of the reference model and its EAGLE head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import graphkit as gk
from graphkit.models import TransformersModel, reference_model
from graphkit.models.tokenizer import decode, encode
from graphkit.ops.loop_layout import Report

ROWS, CONTEXT, NEW, STEPS_PER_LAUNCH, NEWLINE = 2, 96, 24, 8, ord("\n")
TEXTS = ("def __add__(self, other):\n    ret", "import os\nimport ", "for i in ra", "class A(")


@dataclass(eq=False)
class Request:
    """A prompt, its new tokens, and the KV slots that it holds while it runs."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    slots: torch.Tensor = field(init=False)


class Scheduler:
    """Runs requests in the rows of a pool, and keeps the others in a queue."""

    def __init__(self, runner: gk.SpecStepRunner, pool: gk.ReqToTokenPool) -> None:
        self.runner, self.pool = runner, pool
        self.allocator = gk.TokenSlotAllocator(ROWS * CONTEXT)  # on the host: free does not wait
        self.running: dict[int, Request] = {}

    def run(self, requests: Sequence[Request]) -> list[int]:
        """Run requests to their end; return the steps of each launch."""
        waiting, steps_by_launch = deque(requests), []
        while waiting or self.running:
            if waiting and self.pool.available:
                self.admit(waiting.popleft())
                continue
            rows = list(self.running)
            # While requests wait, a loop ends as soon as it frees a row for one of them.
            until = rows if waiting else ()
            steps_by_launch.append(0)
            for step in self.runner.launch(rows, max_steps=STEPS_PER_LAUNCH, until=until):
                steps_by_launch[-1] += 1  # read from pinned memory, while the next step runs
                for each in step.requests:
                    self.receive(each.req_pool_index, each.tokens, each.end)
        return steps_by_launch

    def admit(self, request: Request) -> None:
        """Give a request a row and slots, and prefill its prompt."""
        (row,) = self.pool.alloc(1)
        # A step writes the KV of its drafts behind the committed tokens.
        length = len(request.prompt) + NEW + self.runner.slots_ahead
        request.slots = self.allocator.alloc(length)
        self.pool.req_to_token[row, :length] = request.slots.int()
        self.running[row] = request
        sampling = gk.SamplingParams(max_new_tokens=NEW, stop_token_ids=[NEWLINE])
        report = self.runner.admit(row, request.prompt, sampling)[0].tolist()  # waits for it
        self.receive(row, [report[Report.TOKENS]], report[Report.END])

    def receive(self, row: int, tokens: Sequence[int], end: int) -> None:
        """Deliver tokens. An ended request writes nothing more, so its memory is free."""
        request = self.running[row]
        request.tokens += tokens
        if end != gk.RequestEnd.RUNNING:
            del self.running[row]
            self.pool.free([row])
            self.allocator.free(request.slots)


def create_runner(model: TransformersModel, pool: gk.ReqToTokenPool) -> gk.SpecStepRunner:
    """Create a runner of the reference model with its EAGLE head."""
    spec = model.spec(num_steps=3)
    return gk.SpecStepRunner(
        model.engine_model(pool, spec),
        model.drafter(pool, spec),
        spec=spec,
        sizes=model.sizes(ROWS, CONTEXT, spec),
        device=pool.device,
        is_greedy=True,
    )


def plain(model: TransformersModel, prompt: list[int], device: torch.device) -> list[int]:
    """Decode greedily without drafts, graphs or a KV cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW and (len(ids) == len(prompt) or ids[-1] != NEWLINE):
        logits = model.original(torch.tensor([ids], device=device)).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def main(device: str = "cpu") -> int:
    """Continue all texts in two rows, print them, and compare with plain decoding."""
    torch.set_num_threads(1)  # on the CPU, operations of a small model are too short for more
    pool = gk.ReqToTokenPool(ROWS, CONTEXT, device)
    model = reference_model("EAGLE", device=pool.device)
    requests = [Request(encode(text)) for text in TEXTS]
    with create_runner(model, pool) as runner:
        runner.capture()
        steps = Scheduler(runner, pool).run(requests)
    for text, request in zip(TEXTS, requests, strict=True):
        print(repr(text + decode(request.tokens)))
    print("steps of each launch:", steps)
    return int(any(each.tokens != plain(model, each.prompt, pool.device) for each in requests))


if __name__ == "__main__":
    raise SystemExit(main())
