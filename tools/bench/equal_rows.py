"""Rows of verify steps that have, bit for bit, the logits of decode steps.

A round has a random number of requests over contexts of random lengths, whose keys, values and
states are random numbers. Every request has a random tree of drafts, or a chain. One replay of
TARGET_VERIFY computes all rows. Replays of DECODE run each path from root to leaf, token by token,
and every row is compared with that of its node.

    python tools/bench/equal_rows.py --out tools/bench/results/equal_rows.json
    python tools/bench/equal_rows.py --shape config.json --quantize fp8 --kv-dtype fp8

``results/equal_rows.json`` joins fourteen such reports. A variant is a model and a format; the
models but the first have the sizes of ``served_shapes.py`` and fewer layers, and most of them a
vocabulary of 32,768 tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from equal_texts import llama_1b
from report_file import add_out
from timing import show

from graphkit.engine.attention import TritonAttention
from graphkit.graphs import StateSnapshot, environment, resolve_device
from graphkit.models import TransformersModel, random_model
from graphkit.models.wrapper.text_batches import TextBatches, TreeRequest, run_batch
from graphkit.ops.kv_cache import FP8
from graphkit.records import BenchReport, Measure
from graphkit.runners import Runner
from graphkit.spec import ForwardMode

MODES = ForwardMode.TARGET_VERIFY, ForwardMode.DECODE


class Rounds:
    """Rounds of one model with one width of trees or chains.

    Args:
        model: A model that drafts by n-grams.
        device: The device.
        requests: Most requests of a round.
        context: Tokens of the longest context.
        width: Rows of a request.
        is_tree: Whether requests have trees.
        kv_dtype: Data type of keys and values; ``None`` for that of the model.
    """

    def __init__(
        self, model: TransformersModel, device: torch.device, requests: int, context: int,
        width: int, is_tree: bool, kv_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        drafts = {"num_steps": width - 1}
        if is_tree:
            drafts = {"num_steps": width - 1, "topk": 2, "num_draft_tokens": width}
        self._target = model.target(
            max_batch_size=requests, max_context_len=context + width, kv_dtype=kv_dtype,
            attention=TritonAttention, **drafts,
        )  # fmt: skip
        self._width, self._is_tree, self._context = width, is_tree, context
        attention: Any = self._target.attention
        self._pool = attention[MODES[0]].req_to_token_pool
        self._random = np.random.default_rng([requests, context, width, is_tree])
        self._vocab = self._target.sizes.vocab_size
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < requests]
        self._runners = [
            self._target.runner(mode, device=device, batch_sizes=[*sizes, requests])
            for mode in MODES
        ]
        states = self._target.recurrent_state
        for tensor in self._target.mutable_state.values():
            if tensor.is_floating_point():
                for part in tensor.view(-1).split(2**26):  # few bytes of random numbers at once
                    part.copy_(torch.randn(part.shape, device=device) / 2)
        for runner in self._runners:
            runner.capture()
        self._start = StateSnapshot({} if states is None else states.tensors(), device)

    def run(self) -> tuple[int, int]:
        """Run a round; return the rows that were compared, and those that differ."""
        count = int(self._random.integers(1, self._target.sizes.max_batch_size + 1))
        requests = [self._request(1 + row) for row in self._random.permutation(count).tolist()]
        verify, decode = self._runners
        self._start.restore()
        rows = self._logits(verify, requests, self._width).unflatten(0, (count, self._width))
        compared = np.zeros((count, self._width), dtype=bool)
        different = 0
        for paths in self._paths(requests):
            self._start.restore()
            for depth in range(max(map(len, paths))):
                chosen = [index for index, path in enumerate(paths) if depth < len(path)]
                longer = [
                    self._behind(requests[index], paths[index][: depth + 1]) for index in chosen
                ]
                one = self._logits(decode, longer, 1)
                nodes = [paths[index][depth] for index in chosen]
                is_equal = (one == rows[chosen, nodes]).all(1).cpu().numpy()
                new = ~compared[chosen, nodes]
                different += int((new & ~is_equal).sum())
                compared[chosen, nodes] = True
        assert compared.all()
        return compared.size, different

    def close(self) -> None:
        """Close the runners."""
        for runner in self._runners:
            runner.close()

    def _request(self, row: int) -> TreeRequest:
        length = int(self._random.integers(1, self._context + 1))
        parents = np.maximum(np.arange(self._width) - 1, 0)
        if self._is_tree:
            parents[1:] = [self._random.integers(0, node) for node in range(1, self._width)]
        slots = self._pool.req_to_token[row, : length + self._width].long().cpu().numpy()
        tokens = self._random.integers(0, self._vocab, self._width)
        return TreeRequest(row, np.zeros(length, dtype=np.int64), tokens, parents, slots)

    @staticmethod
    def _paths(requests: list[TreeRequest]) -> Iterator[list[list[int]]]:
        """Yield a path of each request, until every path of all requests was yielded."""
        paths = [request.paths() for request in requests]
        for number in range(max(map(len, paths))):
            yield [own[min(number, len(own) - 1)] for own in paths]

    @staticmethod
    def _behind(request: TreeRequest, path: list[int]) -> TreeRequest:
        """Return a request whose next token is the last node of a path."""
        prompt = np.concatenate([request.prompt, request.tokens[path[:-1]]])
        return replace(
            request, prompt=prompt, tokens=request.tokens[path[-1:]], parents=request.parents[:1]
        )

    def _logits(
        self, runner: Runner[Any, Any], requests: list[TreeRequest], width: int
    ) -> torch.Tensor:
        """Return the logits of a replay, [B * W, V]; DECODE commits the states behind its rows."""
        batch = TextBatches(runner, requests, width=width).step(range(len(requests)))
        batch = replace(batch, commits=runner.mode is ForwardMode.DECODE)
        output: Any = run_batch(
            batch, self._target.recurrent_state, lambda inputs, _without: runner.replay(inputs)
        )
        logits: torch.Tensor = output.next_token_logits.clone()
        return logits


def main(argv: list[str] | None = None) -> int:
    """Run the command. The exit code is 1 if a row differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument("--shape", help="as for graphkit bench (that of Llama-3.2-1B)")
    parser.add_argument("--dtype", default="bfloat16", help="data type of the model (bfloat16)")
    parser.add_argument("--quantize", help="fp8 or int4")
    parser.add_argument("--kv-dtype", choices=["fp8"], help="keys and values of eight bits")
    parser.add_argument("--requests", type=int, default=64, help="most requests (64)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048], help="longest (2048)")
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 16], help="rows (4 and 16)")
    parser.add_argument("--seconds", type=float, default=20, help="time of each setting (20)")
    options = parser.parse_args(argv)
    device = resolve_device(options.device)
    with llama_1b() as file:
        model = random_model(
            options.shape or file, "NGRAM", device=device, dtype=getattr(torch, options.dtype),
            quantize=options.quantize, row_invariant=True,
        )  # fmt: skip
    measures, total = [], 0
    for context in options.contexts:
        for width in options.widths:
            for is_tree in (False, True):
                kv_dtype = FP8 if options.kv_dtype else None
                most = max(1, min(options.requests, options.requests * 2048 // context))
                rounds = Rounds(model, device, most, context, width, is_tree, kv_dtype)
                rows = different = 0
                end = time.monotonic() + options.seconds
                while time.monotonic() < end or not rows:
                    more, wrong = rounds.run()
                    rows, different = rows + more, different + wrong
                rounds.close()
                what = f"{'trees' if is_tree else 'chains'} of {width} rows, contexts to {context}"
                sys.stderr.write(f"{what}: {different} of {rows} rows differ\n")
                measures += [
                    Measure(name=name, value=value, unit="rows", setting=what)
                    for name, value in (("compared", rows), ("different", different))
                ]
                total += different
    report = BenchReport(
        name="rows of verify steps that differ from decode steps",
        environment=environment(device),
        settings={
            "shape": options.shape or "llama-1b", "dtype": options.dtype,
            "quantize": options.quantize or "none", "kv_dtype": options.kv_dtype or "as the model",
            "requests": options.requests,
        },
        measures=tuple(measures),
    )  # fmt: skip
    show(report, options.out)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
