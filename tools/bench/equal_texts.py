"""Texts that are, bit for bit, those of plain decoding at batch 1.

Half of the requests are greedy and half are sampled with seeds. Tokens and the bits of their
log-probabilities are compared with those of plain decoding, one request at a time. Settings differ
in the batch, the drafts, the generation and the chunks of prompts.

    python tools/bench/equal_texts.py --texts 40 --out tools/bench/results/equal_texts.json

``results/equal_texts.json`` joins the reports of three formats (``--quantize``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from report_file import add_out
from timing import show

from graphkit.engine.step import SamplingParams
from graphkit.graphs import environment, resolve_device
from graphkit.models import TransformersModel, random_model
from graphkit.records import BenchReport, Measure

LLAMA_1B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
"""The shape of Llama-3.2-1B."""
PLAIN: Mapping[str, Any] = {"algorithm": "NONE", "max_batch_size": 1}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain, batch 8": {"algorithm": "NONE"},
    "plain, batch 32": {"algorithm": "NONE", "max_batch_size": 32},
    "plain, batch 8, v1": {"algorithm": "NONE", "generation": "v1"},
    "plain, batch 8, chunks of 64": {"algorithm": "NONE", "chunked_prefill_size": 64},
    "plain, batch 8, preempted": {"algorithm": "NONE", "kv_slots": 1024},
    "NGRAM, 3 drafts, batch 1": {"algorithm": "NGRAM", "num_steps": 3, "max_batch_size": 1},
    "NGRAM, 15 drafts, batch 8": {"algorithm": "NGRAM", "num_steps": 15},
    "NGRAM, tree of 16, batch 4": {
        "algorithm": "NGRAM", "num_steps": 4, "topk": 4, "num_draft_tokens": 16,
        "max_batch_size": 4,
    },
    "EAGLE, 3 drafts, batch 8": {"num_steps": 3},
    "EAGLE, tree of 8, batch 32": {
        "num_steps": 3, "topk": 2, "num_draft_tokens": 8, "max_batch_size": 32,
    },
    "EAGLE, 3 drafts, batch 8, v2": {"num_steps": 3, "generation": "v2"},
}  # fmt: skip
Text = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens of a request and their log-probabilities."""


@contextmanager
def llama_1b() -> Iterator[Path]:
    """Yield a file with the config of Llama-3.2-1B."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(LLAMA_1B))
        yield file


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts of 4 to 300 tokens. Some repeat themselves, so that n-grams match."""
    draw = random.Random(0)
    lengths = [draw.randint(4, 300) for _ in range(count)]
    texts = [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
    return [text if number % 3 else (text[:17] * 9)[:150] for number, text in enumerate(texts)]


def texts(
    model: TransformersModel, count: int, tokens: int, setting: Mapping[str, Any], *, captures: bool
) -> list[Text]:
    """Return the texts of an engine with a setting."""
    options = {"max_batch_size": 8, "max_context_len": 512 + tokens}
    with model.engine(**(options | dict(setting))) as engine:
        if captures:
            engine.capture()
        sampled = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
        requests = []
        for number, prompt in enumerate(prompts(count, model.model.config.vocab_size)):
            filters = sampled if number % 2 else {}
            sampling = SamplingParams(max_new_tokens=tokens, logprobs=True, seed=number, **filters)
            requests.append(engine.submit(prompt, sampling))
        while not all(request.finish_reason for request in requests):
            engine.step()
    return [(tuple(request.output_ids), tuple(request.logprobs)) for request in requests]


def measures(expected: Sequence[Text], found: Mapping[str, Sequence[Text]]) -> Iterator[Measure]:
    """Yield how many texts, and how many texts with their log-probabilities, are equal."""
    for setting, own in found.items():
        pairs = list(zip(expected, own, strict=True))
        tokens = sum(one[0] == other[0] for one, other in pairs)
        unit = f"of {len(pairs)}"
        yield Measure(name="equal texts", value=tokens, unit=unit, variant=setting)
        bits = sum(one == other for one, other in pairs)
        yield Measure(name="equal log-probabilities", value=bits, unit=unit, variant=setting)


def main(argv: list[str] | None = None) -> int:
    """Run the command. The exit code is 1 if a text differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument("--shape", help="as for graphkit bench (that of Llama-3.2-1B)")
    parser.add_argument("--dtype", default="bfloat16", help="data type of the model (bfloat16)")
    parser.add_argument("--quantize", help="fp8 or int4")
    parser.add_argument("--texts", type=int, default=32, help="number of requests (32)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each (128)")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--eager", action="store_true", help="run without graphs")
    options = parser.parse_args(argv)
    device = resolve_device(options.device)
    with llama_1b() as file:
        model = random_model(
            options.shape or file, device=device, dtype=getattr(torch, options.dtype),
            quantize=options.quantize, row_invariant=True,
        )  # fmt: skip
    size = (options.texts, options.tokens)
    expected = texts(model, *size, PLAIN, captures=not options.eager)
    found = {}
    for name in options.only:
        found[name] = texts(model, *size, SETTINGS[name], captures=not options.eager)
        sys.stderr.write(f"{name}: {sum(map(tuple.__eq__, expected, found[name]))} equal\n")
    report = BenchReport(
        name="texts that are those of plain decoding at batch 1",
        environment=environment(device),
        settings={
            "shape": options.shape or "llama-1b", "dtype": options.dtype,
            "quantize": options.quantize or "none", "new tokens": options.tokens,
        },
        measures=tuple(measures(expected, found)),
    )  # fmt: skip
    show(report, options.out)
    return int(any(list(own) != expected for own in found.values()))


if __name__ == "__main__":
    sys.exit(main())
