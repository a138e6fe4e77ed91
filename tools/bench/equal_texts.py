"""Texts that are, bit for bit, those of plain decoding at batch 1.

Half of the requests are greedy and half are sampled with seeds. Tokens and the bits of their
log-probabilities are compared with those of plain decoding, one request at a time. Settings differ
in the drafter, the drafts, the batch, the generation and the chunks of prompts. Random heads draft
for a model of random weights, and all trained ones for the reference model.

    python tools/bench/equal_texts.py --texts 40 --out tools/bench/results/equal_texts.json
    python tools/bench/equal_texts.py --texts 40 --shape reference
    torchrun --nproc-per-node 2 tools/bench/equal_texts.py --texts 40 --tp 2 --one-shot

``results/equal_texts.json`` joins the reports of three formats (``--quantize``), of the reference
model, of a mixture of experts with four layers of the size of Qwen3-30B-A3B, and of two GPUs, which
are compared with plain decoding on the same two.
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
from report_file import add_out, write_report
from timing import show

from graphkit.cli.ranks import add_tp_option
from graphkit.distributed import RankGroup
from graphkit.engine.step import SamplingParams
from graphkit.graphs import environment, resolve_device
from graphkit.models import TransformersModel, random_model
from graphkit.models.reference import reference_model
from graphkit.models.shapes import ALGORITHMS
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
    "plain, batch 8, chunks of 8192": {"algorithm": "NONE", "chunked_prefill_size": 8192},
    "plain, batch 8, preempted": {"algorithm": "NONE", "kv_slots": 1.05},
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
    "EAGLE, chosen drafts, batch 64": {"max_batch_size": 64},
    "EAGLE, 1 or 4 drafts, batch 8, v2": {"num_steps": (1, 4), "generation": "v2"},
    "EAGLE3, 5 drafts, batch 64": {"algorithm": "EAGLE3", "num_steps": 5, "max_batch_size": 64},
    "EAGLE3, tree of 16, batch 8, v1": {
        "algorithm": "EAGLE3", "num_steps": 4, "topk": 4, "num_draft_tokens": 16,
        "generation": "v1",
    },
    "DFLASH, batch 16": {"algorithm": "DFLASH", "max_batch_size": 16},
    "MTP, 3 drafts, batch 16": {
        "algorithm": "MULTI_LAYER_EAGLE", "num_steps": 3, "max_batch_size": 16,
    },
    "STANDALONE, 3 drafts, batch 8": {"algorithm": "STANDALONE", "num_steps": 3},
    "STANDALONE, tree of 8, batch 16": {
        "algorithm": "STANDALONE", "num_steps": 3, "topk": 2, "num_draft_tokens": 8,
        "max_batch_size": 16,
    },
}  # fmt: skip
"""Settings of engines. The drafter is EAGLE by default; ``kv_slots`` counts longest requests."""
REFERENCE = "reference"
"""``--shape`` of the reference model."""
LONG_PROMPT = 6000
"""Most tokens of a prompt, unless the model has fewer positions."""
Text = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens of a request and their log-probabilities."""


@contextmanager
def llama_1b() -> Iterator[Path]:
    """Yield a file with the config of Llama-3.2-1B."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(LLAMA_1B))
        yield file


def prompts(count: int, vocab_size: int, longest: int) -> list[list[int]]:
    """Return random prompts of 4 to 300 tokens, and one in ten of up to ``longest``.

    Some repeat themselves, so that n-grams match.
    """
    draw = random.Random(0)
    lengths = [draw.randint(4, 300 if number % 10 else longest) for number in range(count)]
    texts = [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
    return [text if number % 3 else (text[:17] * 9)[:150] for number, text in enumerate(texts)]


def texts(
    model: TransformersModel, count: int, tokens: int, setting: Mapping[str, Any], *, captures: bool
) -> list[Text]:
    """Return the texts of an engine with a setting."""
    config = model.model.config
    context = min(LONG_PROMPT + tokens + 64, config.max_position_embeddings)
    options: dict[str, Any] = {"max_batch_size": 8, "max_context_len": context}
    options |= setting
    if "kv_slots" in setting:
        options["kv_slots"] = int(setting["kv_slots"] * context)
    with model.engine(**options) as engine:
        if captures:
            engine.capture()
        if engine.group is not None and engine.group.rank:
            engine.worker_loop()
            return []
        sampled = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
        requests = []
        longest = context - tokens - 64
        for number, prompt in enumerate(prompts(count, config.vocab_size, longest)):
            filters = sampled if number % 2 else {}
            sampling = SamplingParams(max_new_tokens=tokens, logprobs=True, seed=number, **filters)
            requests.append(engine.submit(prompt, sampling))
        while not all(request.finish_reason for request in requests):
            engine.step()
        if "kv_slots" in setting and not engine.stats.preemptions:
            raise RuntimeError("no request was preempted: take more texts")
    return [(tuple(request.output_ids), tuple(request.logprobs)) for request in requests]


def measures(pairs: Sequence[tuple[Text, Text]], **cell: str) -> Iterator[Measure]:
    """Yield how many texts, and how many texts with their log-probabilities, are equal."""
    unit = f"of {len(pairs)}"
    tokens = sum(one[0] == other[0] for one, other in pairs)
    yield Measure(name="equal texts", value=tokens, unit=unit, **cell)
    bits = sum(one == other for one, other in pairs)
    yield Measure(name="equal log-probabilities", value=bits, unit=unit, **cell)


def models(
    shape: str | Path, names: Sequence[str], **options: Any
) -> Iterator[tuple[TransformersModel, list[str]]]:
    """Yield models whose drafters are those of settings, and the names of the settings."""
    algorithms = {name: SETTINGS[name].get("algorithm", "EAGLE") for name in names}
    by_drafter: dict[str, list[str]] = {}
    for name, algorithm in algorithms.items():
        drafter = "EAGLE" if algorithm in ("NONE", "NGRAM") else algorithm
        by_drafter.setdefault(drafter, []).append(name)
    for drafter, own in by_drafter.items():
        if shape == REFERENCE:
            yield reference_model(drafter, **options), own
        elif drafter in ALGORITHMS:
            yield random_model(shape, drafter, **options), own


def run(options: argparse.Namespace, group: RankGroup | None) -> int:
    """Run the command on one rank. The exit code is 1 if a text differs."""
    device = resolve_device(options.device)
    size, found = (options.texts, options.tokens), list[Measure]()
    is_equal, captures = True, not options.eager

    def report() -> BenchReport:
        return BenchReport(
            name="texts that are those of plain decoding at batch 1",
            environment=environment(device),
            settings={"texts": options.texts, "new tokens": options.tokens},
            measures=tuple(found),
        )

    cell = f"{options.shape or 'llama-1b'}, {options.quantize or options.dtype}"
    reports = group is None or group.rank == 0
    if group is not None:
        cell += f", {group.size} ranks"
    with llama_1b() as file:
        for model, names in models(
            options.shape or file, options.only, device=device, group=group,
            dtype=getattr(torch, options.dtype), quantize=options.quantize, row_invariant=True,
        ):  # fmt: skip
            expected = texts(model, *size, PLAIN, captures=captures)
            for name in names:
                own = texts(model, *size, SETTINGS[name], captures=captures)
                pairs = list(zip(expected, own, strict=True))
                found += measures(pairs, variant=name, setting=cell)
                is_equal &= own == expected
                if reports:
                    sys.stderr.write(f"{name}: {sum(map(tuple.__eq__, expected, own))} equal\n")
                    write_report(report(), options.out)  # a later setting may be interrupted
    if reports:
        show(report(), options.out)
    return int(not is_equal)


def main(argv: list[str] | None = None) -> int:
    """Run the command on all ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_out(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    parser.add_argument(
        "--shape", help=f"as for graphkit bench, or {REFERENCE} (that of Llama-3.2-1B)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="data type of the model (bfloat16)")
    parser.add_argument("--quantize", help="fp8 or int4")
    parser.add_argument("--texts", type=int, default=32, help="number of requests (32)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each (128)")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--eager", action="store_true", help="run without graphs")
    add_tp_option(parser, run)
    parser.set_defaults(verbose=True)
    options = parser.parse_args(argv)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
