"""Time to the first token of a prompt: graphkit beside an eager forward of transformers.

An 8B Llama of random bfloat16 weights, one request, an idle device. The forward of transformers has
``sdpa`` attention, no cache, and the logits of the last token alone. graphkit runs an engine with
default settings, until the token is on the host. The bound is the operations of the weights and of
causal attention, at the speed of a large product.

    python tools/bench/first_token.py --out tools/bench/results/first_token.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from fusion import model_of_transformers
from timing import publish
from transformers import LlamaForCausalLM

import graphkit as gk
from graphkit.cli.benchmarks import synchronise
from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure

LENGTHS = {512: 1.0, 8192: 1.05, 32768: 1.05}
"""Tokens of a prompt, and the most time over that of transformers."""


def milliseconds(run: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Return the median time of calls after two that warm up."""
    times = []
    for _ in range(2 + rounds):
        synchronise(device)
        began = time.perf_counter()
        run()
        synchronise(device)
        times.append((time.perf_counter() - began) * 1e3)
    return median(times[2:])


def product_flops(device: torch.device) -> float:
    """Return the operations per millisecond of a product of large matrices of bfloat16."""
    size = 8192 if device.type == "cuda" else 256
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    return 2 * size**3 / milliseconds(lambda: left @ left, 10, device)


def operations(model: LlamaForCausalLM, length: int) -> float:
    """Return the operations of a forward: two per weight and token, and causal attention."""
    config = model.config
    weights = sum(each.numel() for each in model.model.layers.parameters())
    heads = config.num_attention_heads * config.head_dim
    attention = config.num_hidden_layers * 2 * heads * length**2
    return 2 * weights * length + attention + 2 * model.lm_head.weight.numel()


def report(rounds: int, device: torch.device, shape: str = "llama-8b") -> BenchReport:
    """Measure a model of a shape."""
    model = model_of_transformers(shape, device).eval()
    lengths = {n: bar for n, bar in LENGTHS.items() if n <= model.config.max_position_embeddings}
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.vocab_size
    prompts = {n: torch.randint(3, vocab, (1, n), generator=generator) for n in lengths}
    flops, eager = product_flops(device), {}
    measures: list[Measure] = []
    for length, ids in prompts.items():
        ids = ids.to(device)
        eager[length] = milliseconds(
            lambda ids=ids: model(ids, use_cache=False, logits_to_keep=1).logits.argmax(-1).item(),
            rounds, device,
        )  # fmt: skip
    engine = gk.models.load(model, check=False).engine(
        algorithm="NONE", max_batch_size=1, max_context_len=max(lengths) + 64
    )
    with engine:
        engine.capture()
        one = gk.SamplingParams(max_new_tokens=1)
        for length, bar in lengths.items():
            text = prompts[length][0].tolist()
            ours = milliseconds(lambda text=text: engine.generate([text], one), rounds, device)
            bound = operations(model, length) / flops
            setting = f"{length} tokens"
            times = {"bound": bound, "eager forward of transformers": eager[length]}
            measures += [
                Measure(name="time", value=value, unit="ms", setting=setting, variant=variant)
                for variant, value in (times | {"graphkit": ours}).items()
            ]
            ratio = ours / eager[length]
            measures.append(
                Measure(
                    name="over transformers", value=ratio, unit="x", bar=bar,
                    setting=setting, variant="graphkit",
                )
            )  # fmt: skip
    return BenchReport(
        name="time to the first token",
        environment=environment(device),
        settings={"shape": shape, "dtype": "bfloat16", "rounds": rounds},
        measures=tuple(measures),
    )


if __name__ == "__main__":
    sys.exit(publish(__doc__ or "", 5, report, None, has_device=True))
