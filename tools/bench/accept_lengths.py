"""Accept lengths of the reference drafters on held-out source files, greedy.

Every drafter continues the same prompts, with the same number of drafts. The text of all of them
must be that of plain decoding. Algorithms whose draft model makes more drafts than it makes steps
run with those, too. EAGLE and EAGLE-3 run again with the target's keys and values in FP8, and are
compared with plain decoding over such keys and values.

    python tools/bench/accept_lengths.py --out tools/bench/results/accept_lengths.json
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

import torch

from graphkit import SamplingParams
from graphkit.graphs import environment, resolve_device
from graphkit.records import BenchReport, Measure
from graphkit.reference import reference_engine

sys.path.insert(0, str(Path(__file__).parents[1]))
from training.corpus import read_corpus

RUNS = (
    ("NGRAM", 3, None), ("STANDALONE", 3, None), ("EAGLE", 3, None), ("EAGLE3", 3, None),
    ("MULTI_LAYER_EAGLE", 3, None), ("DFLASH", 3, None), ("EAGLE", 7, None), ("DFLASH", 7, None),
    ("EAGLE", 3, torch.float8_e4m3fn), ("EAGLE3", 3, torch.float8_e4m3fn),
)  # fmt: skip
"""Algorithms with the drafts of a step, and the data type of keys and values if it is another.

7 drafts are a whole block of the DFLASH head.
"""
_PROMPT = 96
"""Bytes of a prompt."""


def held_out_prompts(count: int) -> list[list[int]]:
    """Return excerpts of files that are held out of training, evenly spread."""
    text = read_corpus(Path(sysconfig.get_paths()["stdlib"]), held_out=True)
    starts = torch.arange(count) * (len(text) - _PROMPT) // count
    return [text[start : start + _PROMPT].tolist() for start in starts.tolist()]


def texts_and_length(
    algorithm: str,
    drafts: int,
    kv_dtype: torch.dtype | None,
    prompts: list[list[int]],
    new_tokens: int,
    device: torch.device,
) -> tuple[list[list[int]], float]:
    """Continue the prompts; return the texts and the mean tokens of a verify step."""
    with reference_engine(
        algorithm,
        num_steps=drafts,
        max_context_len=_PROMPT + new_tokens + 32,
        device=device,
        kv_dtype=kv_dtype,
    ) as engine:
        requests = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens))
        return [request.output_ids for request in requests], engine.stats.accept_length


def measured(count: int, new_tokens: int, device: torch.device) -> BenchReport:
    """Measure every run, and compare its texts with those of plain decoding."""
    prompts = held_out_prompts(count)
    common = prompts, new_tokens, device
    expected = {
        kv_dtype: texts_and_length("NONE", 0, kv_dtype, *common)[0]
        for kv_dtype in {kv_dtype for *_, kv_dtype in RUNS}
    }
    measures = []
    for algorithm, drafts, kv_dtype in RUNS:
        texts, length = texts_and_length(algorithm, drafts, kv_dtype, *common)
        wrong = sum(one != other for one, other in zip(texts, expected[kv_dtype], strict=True))
        variant = algorithm if kv_dtype is None else f"{algorithm}, FP8 KV"
        found = {"accept length": (length, "tokens", None), "other texts": (wrong, "texts", 0.0)}
        measures += [
            Measure(
                name=name, value=float(value), unit=unit, bar=bar,
                setting=f"{drafts} drafts", variant=variant,
            )
            for name, (value, unit, bar) in found.items()
        ]  # fmt: skip
        print(f"{variant}, {drafts} drafts: {length:.2f}", file=sys.stderr)
    return BenchReport(
        name="accept lengths",
        environment=environment(device),
        settings={"prompts": count, "prompt bytes": _PROMPT, "new tokens": new_tokens},
        measures=tuple(measures),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="auto", help="device (%(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of each (%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args(argv)
    report = measured(options.prompts, options.new_tokens, resolve_device(options.device))
    if options.out is not None:
        options.out.write_text(report.to_json() + "\n", encoding="utf-8")
    return int(any(each.bar is not None and each.value > each.bar for each in report.measures))


if __name__ == "__main__":
    sys.exit(main())
