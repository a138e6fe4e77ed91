"""Accept lengths of the reference drafters on held-out source files, greedy.

Every drafter continues the same prompts, with the same number of drafts. The text of all of them
must be that of plain decoding. Algorithms whose draft model makes more drafts than it makes steps
run with those, too. EAGLE and EAGLE-3 run again with keys and values in FP8, and with quantised
weights. Each run is compared with plain decoding by the same target.

    python tools/bench/accept_lengths.py --out tools/bench/results/accept_lengths.json
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from report_file import add_out, write_report

from graphkit import SamplingParams
from graphkit.graphs import environment, resolve_device
from graphkit.models.reference import reference_model
from graphkit.records import BenchReport, Measure

sys.path.insert(0, str(Path(__file__).parents[1]))
from training.corpus import read_corpus


class Run(NamedTuple):
    """An algorithm, and the data types of keys, values and weights that it runs with.

    Attributes:
        algorithm: The algorithm.
        drafts: Drafts of a step. 7 are a whole block of the DFLASH head.
        kv_dtype: Data type of the target's keys and values; ``None`` selects that of the model.
        quantize: Format of the weights of target and draft head; ``None`` keeps them.
    """

    algorithm: str
    drafts: int
    kv_dtype: torch.dtype | None = None
    quantize: str | None = None

    @property
    def name(self) -> str:
        """Its name in reports."""
        kv = "" if self.kv_dtype is None else ", FP8 KV"
        weights = "" if self.quantize is None else f", {self.quantize.upper()} weights"
        return f"{self.algorithm}{kv}{weights}"


RUNS = (
    Run("NGRAM", 3), Run("STANDALONE", 3), Run("EAGLE", 3), Run("EAGLE3", 3),
    Run("MULTI_LAYER_EAGLE", 3), Run("DFLASH", 3), Run("EAGLE", 7), Run("DFLASH", 7),
    Run("EAGLE", 3, torch.float8_e4m3fn), Run("EAGLE3", 3, torch.float8_e4m3fn),
    Run("EAGLE", 3, None, "fp8"), Run("EAGLE3", 3, None, "fp8"),
    Run("EAGLE", 3, None, "int4"), Run("EAGLE3", 3, None, "int4"),
)  # fmt: skip
_PROMPT = 96
"""Bytes of a prompt."""


def held_out_prompts(count: int) -> list[list[int]]:
    """Return excerpts of files that are held out of training, evenly spread."""
    text = read_corpus(Path(sysconfig.get_paths()["stdlib"]), held_out=True)
    starts = torch.arange(count) * (len(text) - _PROMPT) // count
    return [text[start : start + _PROMPT].tolist() for start in starts.tolist()]


def texts_and_length(
    run: Run, prompts: list[list[int]], new_tokens: int, device: torch.device
) -> tuple[list[list[int]], float]:
    """Continue the prompts; return the texts and the mean tokens of a verify step."""
    model = reference_model(run.algorithm, device=device, quantize=run.quantize)
    with model.engine(
        num_steps=run.drafts,
        max_batch_size=8,
        max_context_len=_PROMPT + new_tokens + 32,
        kv_dtype=run.kv_dtype,
    ) as engine:
        requests = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens))
        return [request.output_ids for request in requests], engine.stats.accept_length


def measured(count: int, new_tokens: int, device: torch.device) -> BenchReport:
    """Measure every run, and compare its texts with those of plain decoding."""
    prompts = held_out_prompts(count)
    common = prompts, new_tokens, device
    plain = {run._replace(algorithm="NONE", drafts=0) for run in RUNS}
    expected = {run: texts_and_length(run, *common)[0] for run in plain}
    measures = []
    for run in RUNS:
        texts, length = texts_and_length(run, *common)
        own = expected[run._replace(algorithm="NONE", drafts=0)]
        wrong = sum(one != other for one, other in zip(texts, own, strict=True))
        found = {"accept length": (length, "tokens", None), "other texts": (wrong, "texts", 0.0)}
        measures += [
            Measure(
                name=name, value=float(value), unit=unit, bar=bar,
                setting=f"{run.drafts} drafts", variant=run.name,
            )
            for name, (value, unit, bar) in found.items()
        ]  # fmt: skip
        print(f"{run.name}, {run.drafts} drafts: {length:.2f}", file=sys.stderr)
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
    add_out(parser)
    options = parser.parse_args(argv)
    report = measured(options.prompts, options.new_tokens, resolve_device(options.device))
    write_report(report, options.out)
    return int(any(each.bar is not None and each.value > each.bar for each in report.measures))


if __name__ == "__main__":
    sys.exit(main())
