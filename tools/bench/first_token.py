"""Time to the first token of a prompt: graphkit beside an eager forward of transformers.

An 8B Llama of random bfloat16 weights, one request, an idle device. The forward of transformers has
``sdpa`` attention, no cache, and the logits of the last token alone. graphkit runs an engine until
the token is on the host: with default settings, with row-invariant ops, and with larger chunks. The
bound is the operations of the weights and of causal attention, at the speed of a large product.

    python tools/bench/first_token.py --out tools/bench/results/first_token.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
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
TRANSFORMERS = "eager forward of transformers"
VARIANTS = (
    ("graphkit", False, None), ("graphkit, row-invariant", True, None),
    ("graphkit, chunks of 8192", False, 8192),
)  # fmt: skip
"""Loads and engines: a name, ``row_invariant`` and ``chunked_prefill_size``."""


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
    flops = product_flops(device)
    times: dict[str, dict[int, float]] = {
        "bound": {n: operations(model, n) / flops for n in prompts},
        TRANSFORMERS: {n: _eager_ms(model, ids, rounds, device) for n, ids in prompts.items()},
    }
    del model
    for variant, row_invariant, chunk in VARIANTS:
        model = model_of_transformers(shape, device)
        loaded = gk.models.load(model, check=False, row_invariant=row_invariant)
        with loaded.engine(
            algorithm="NONE", max_batch_size=1, max_context_len=max(lengths) + 64,
            chunked_prefill_size=chunk,
        ) as engine:  # fmt: skip
            engine.capture()
            one = gk.SamplingParams(max_new_tokens=1)
            times[variant] = {
                n: milliseconds(partial(engine.generate, ids.tolist(), one), rounds, device)
                for n, ids in prompts.items()
            }
        del model, loaded, engine  # before the weights of the next one
    measures = [
        Measure(name="time", value=ms, unit="ms", setting=f"{n} tokens", variant=variant)
        for variant, by_length in times.items()
        for n, ms in by_length.items()
    ]
    measures += [
        Measure(
            name="over transformers", value=times[variant][n] / times[TRANSFORMERS][n], unit="x",
            setting=f"{n} tokens", variant=variant, bar=bar if variant == VARIANTS[0][0] else None,
        )
        for variant, *_ in VARIANTS
        for n, bar in lengths.items()
    ]  # fmt: skip
    return BenchReport(
        name="time to the first token",
        environment=environment(device),
        settings={"shape": shape, "dtype": "bfloat16", "rounds": rounds},
        measures=tuple(measures),
    )


def _eager_ms(
    model: LlamaForCausalLM, ids: torch.Tensor, rounds: int, device: torch.device
) -> float:
    ids = ids.to(device)
    run = lambda: model(ids, use_cache=False, logits_to_keep=1).logits.argmax(-1).item()  # noqa: E731
    return milliseconds(run, rounds, device)


if __name__ == "__main__":
    sys.exit(publish(__doc__ or "", 5, report, None, has_device=True))
