"""Speed of transformers' ``generate`` with the reference weights, greedy, one request.

Prints one JSON line per way of generating. ``step.py`` runs it in a process of its own.

    python tools/bench/transformers_generate.py --tokens 64
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from step_engines import prompts

from graphkit.cli.benchmarks import synchronise
from graphkit.models.reference import default_checkpoint

_WARM_UPS = 2
"""torch.compile compiles the first run, and records CUDA graphs in the second one."""


def ways(tokens: int, device: torch.device) -> Iterator[tuple[str, float]]:
    """Yield the name of each way to generate, and its tokens per second."""
    import transformers

    transformers.logging.set_verbosity_error()

    def load(folder: Path) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        return model.to(device, torch.bfloat16).eval()

    model, ids = load(default_checkpoint()), torch.tensor(prompts(1), device=device)

    def tokens_per_second(**options: Any) -> float:
        elapsed = 0.0
        for _ in range(_WARM_UPS + 1):
            synchronise(device)
            began = time.perf_counter()
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                max_new_tokens=tokens, **options,
            )  # fmt: skip
            synchronise(device)
            elapsed = time.perf_counter() - began
        return (out.shape[1] - ids.shape[1]) / elapsed

    yield "dynamic cache", tokens_per_second()
    assistant = load(default_checkpoint("standalone"))
    yield "assisted by the draft model", tokens_per_second(assistant_model=assistant)
    speed = tokens_per_second(cache_implementation="static")
    is_compiled = getattr(model, "_compiled_call", None) is not None
    yield "static cache" + ", compiled" * is_compiled, speed


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (64)")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    options = parser.parse_args(argv)
    with torch.no_grad():
        for name, speed in ways(options.tokens, torch.device(options.device)):
            print(json.dumps({"name": name, "tokens per second": speed}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
