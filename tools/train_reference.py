"""Train the byte-level reference models on the Python standard library's source.

Progress goes to stderr; a line on stdout for each model tells how its weights, as saved, do on
files that it has not seen.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from training.corpus import CONTEXT, all_windows, random_windows, read_corpus
from training.loop import optimise
from training.recipes import RECIPES, Facts, Recipe

from graphkit import reference
from graphkit.reference import LlamaModel

WEIGHTS = reference.default_checkpoint().parent


def main(argv: list[str] | None = None) -> int:
    """Train, save, measure the saved weights, and report."""
    options = parse(argv)
    corpus = read_corpus(options.source, held_out=False).to(options.device)
    held_out = read_corpus(options.source, held_out=True).to(options.device)
    windows = all_windows(held_out, options.batch)
    names = list(RECIPES) if options.model == "all" else [options.model]
    for name in names:
        root = options.out if "target" in names else WEIGHTS
        target = None if name == "target" else root / "target"
        facts = make(name, target, corpus, windows, options)
        print(f"{name}:", ", ".join(f"{fact} {value}" for fact, value in facts.items()))
    return 0


def make(
    name: str,
    target: Path | None,
    corpus: Tensor,
    held_out: tuple[Tensor, ...],
    options: argparse.Namespace,
) -> Facts:
    """Train one model, save it and return what is known about it, which is saved beside it."""
    begin, recipe, folder = time.perf_counter(), RECIPES[name], options.out / name
    torch.manual_seed(options.seed)
    print(f"training {name}", file=sys.stderr)
    teacher = load_target(target, options.device, torch.float32)
    model = recipe.build(teacher).to(options.device)
    reference.initialise(model, recipe.config.num_hidden_layers)
    steps = train(recipe, model, teacher, corpus, options)
    recipe.save(model.bfloat16(), folder)
    judge = load_target(target, options.device, torch.bfloat16)
    facts = recipe.measure(folder, judge, held_out) | {
        "seed": options.seed,
        "steps": steps,
        "tokens": steps * options.batch * CONTEXT,
        "corpus_bytes": len(corpus),
        "device": torch.cuda.get_device_name(corpus.device) if corpus.is_cuda else "CPU",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "seconds": round(time.perf_counter() - begin, 1),
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def load_target(folder: Path | None, device: torch.device, dtype: torch.dtype) -> LlamaModel | None:
    """Load the target, where there is one."""
    return folder and reference.load_checkpoint(folder, device=device, dtype=dtype)


def train(
    recipe: Recipe,
    model: nn.Module,
    target: LlamaModel | None,
    corpus: Tensor,
    options: argparse.Namespace,
) -> int:
    """Train on random windows, in bfloat16 on CUDA; return the steps taken."""
    windows = random_windows(corpus, options.batch, options.seed)
    loss_of = torch.compile(recipe.loss) if options.compile else recipe.loss

    def next_loss() -> Tensor:
        with torch.autocast(corpus.device.type, torch.bfloat16, enabled=corpus.is_cuda):
            return loss_of(model, target, next(windows))

    steps = options.steps or recipe.steps
    return optimise(list(model.parameters()), next_loss, steps, options.limit_seconds)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the byte-level reference models.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--model", choices=[*RECIPES, "all"], default="target", help="what to train")
    add("--out", type=Path, default=WEIGHTS, help="folder that gets a folder for each model")
    add("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="what to learn")
    add("--steps", type=int, help="instead of each model's own number")
    add("--batch", type=int, default=64, help=f"windows of {CONTEXT} tokens per step")
    add("--device", type=torch.device, default=device)
    add("--seed", type=int, default=0)
    add("--limit-seconds", type=float, default=math.inf, help="stop training each model by then")
    add("--compile", action="store_true", help="use torch.compile")
    options = parser.parse_args(argv)
    given = (options.steps, options.batch, options.limit_seconds)
    if any(value is not None and value <= 0 for value in given):
        parser.error("--steps, --batch and --limit-seconds must be above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
