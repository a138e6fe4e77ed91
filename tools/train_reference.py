"""Train the byte-level reference models on the source of the Python standard library.

Writes progress to stderr. For each model, writes a line to stdout with the results of its saved
weights on held-out files. ``--measure`` does this for weights that exist.
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
from training.loop import PEAK_RATE, optimise
from training.recipes import RECIPES, Recipe, Results

from graphkit import models
from graphkit.models import TransformersModel
from graphkit.models.reference import default_checkpoint

WEIGHTS = default_checkpoint().parent


def main(argv: list[str] | None = None) -> int:
    """Run the command: train the models and save them, or load them, and print their results."""
    options = parse(argv)
    corpus = read_corpus(options.source, held_out=False).to(options.device)
    held_out = read_corpus(options.source, held_out=True).to(options.device)
    windows = all_windows(held_out, options.batch, options.held_out_windows)
    names = list(RECIPES) if options.model == "all" else [options.model]
    for name in names:
        root = options.out if "target" in names else WEIGHTS
        target = None if name == "target" else root / "target"
        if options.measure:
            teacher = load_target(target, options.device, torch.bfloat16)
            results = RECIPES[name].measure(options.out / name, teacher, windows)
        else:
            results = train_model(name, target, corpus, windows, options)
        print(f"{name}:", ", ".join(f"{key} {value}" for key, value in results.items()))
    return 0


def train_model(
    name: str,
    target: Path | None,
    corpus: Tensor,
    held_out: tuple[Tensor, ...],
    options: argparse.Namespace,
) -> Results:
    """Train and save one model; return its results, which ``training.json`` contains too."""
    begin, recipe, folder = time.perf_counter(), RECIPES[name], options.out / name
    torch.manual_seed(options.seed)
    print(f"training {name}", file=sys.stderr)
    teacher = load_target(target, options.device, torch.float32)
    model = recipe.build(teacher, corpus).to(options.device)
    steps = train(recipe, model, teacher, corpus, options)
    recipe.save(model.bfloat16(), folder)
    eval_target = load_target(target, options.device, torch.bfloat16)
    results = recipe.measure(folder, eval_target, held_out) | {
        "seed": options.seed,
        "steps": steps,
        "tokens": steps * options.batch * CONTEXT,
        "corpus_bytes": len(corpus),
        "held_out_windows": sum(map(len, held_out)),
        "device": torch.cuda.get_device_name(corpus.device) if corpus.is_cuda else "CPU",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "seconds": round(time.perf_counter() - begin, 1),
    }
    (folder / "training.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def load_target(
    folder: Path | None, device: torch.device, dtype: torch.dtype
) -> TransformersModel | None:
    """Load the target from its folder; return ``None`` without a folder."""
    return folder and models.load(folder, device=device, dtype=dtype, fuse=False, check=False)


def train(
    recipe: Recipe,
    model: nn.Module,
    target: TransformersModel | None,
    corpus: Tensor,
    options: argparse.Namespace,
) -> int:
    """Train on random windows, in bfloat16 on CUDA; return the number of steps."""
    windows = random_windows(corpus, options.batch, options.seed)
    loss_of = torch.compile(recipe.loss) if options.compile else recipe.loss

    def next_loss() -> Tensor:
        with torch.autocast(corpus.device.type, torch.bfloat16, enabled=corpus.is_cuda):
            return loss_of(model, target, next(windows))

    steps, limit = options.steps or recipe.steps, options.limit_seconds
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return optimise(weights, next_loss, steps, limit, options.peak_rate)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the byte-level reference models.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--model", choices=[*RECIPES, "all"], default="target", help="model to train (%(default)s)")
    add("--out", type=Path, default=WEIGHTS, help="parent of the output folders")
    add(
        "--source",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="folder of Python files to train on",
    )
    add("--steps", type=int, help="training steps; each model has its own default")
    add("--peak-rate", type=float, default=PEAK_RATE, help="largest learning rate (%(default)s)")
    add("--batch", type=int, default=64, help=f"windows of {CONTEXT} tokens per step")
    add("--held-out-windows", type=int, help="most held-out windows to measure; default all")
    add("--device", type=torch.device, default=device, help="device (%(default)s)")
    add("--seed", type=int, default=0, help="random seed (%(default)s)")
    add("--limit-seconds", type=float, default=math.inf, help="time limit per model")
    add("--measure", action="store_true", help="measure the models in --out without training")
    add("--compile", action="store_true", help="use torch.compile")
    options = parser.parse_args(argv)
    given = (options.steps, options.batch, options.limit_seconds, options.held_out_windows)
    if any(value is not None and value <= 0 for value in given):
        names = "--steps, --batch, --limit-seconds and --held-out-windows"
        parser.error(f"{names} must be above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
