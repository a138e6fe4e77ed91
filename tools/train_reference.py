"""Train the byte-level reference model on the Python standard library's source.

Progress goes to stderr; the last line on stdout gives the held-out loss of the weights as saved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from graphkit import reference
from graphkit.reference import LlamaConfig, LlamaModel
from graphkit.reference.tokenizer import END_OF_TEXT, VOCAB_SIZE

CONTEXT = 512
PEAK_RATE, WARM_UP, LOG_EVERY = 3e-3, 0.03, 50
# What differs between distributions of Python (packages, tests), and tables that are not code.
SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)


def is_held_out(name: str) -> bool:
    """Choose about 5 % of files by their name, the same ones on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % 20 == 0


def read_corpus(root: Path, *, held_out: bool) -> Tensor:
    """Join one side's files in the order of their names, END_OF_TEXT after each: uint8 [bytes]."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(path.as_posix() for path in paths if not SKIPPED & set(path.parts))
    chosen = [root / name for name in names if is_held_out(name) is held_out]
    joined = b"".join(path.read_bytes() + bytes([END_OF_TEXT]) for path in chosen)
    if len(joined) <= CONTEXT:
        raise SystemExit(f"error: {root} has too little source: {len(joined)} bytes {held_out=}.")
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def windows_at(corpus: Tensor, starts: Tensor) -> Tensor:
    """Return the windows that begin at ``starts`` [B]: int64 [B, CONTEXT + 1]."""
    return corpus[starts[:, None] + torch.arange(CONTEXT + 1, device=corpus.device)].long()


def random_windows(corpus: Tensor, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Yield windows [B, L + 1] without end, on the corpus's device."""
    generator = torch.Generator(corpus.device).manual_seed(seed)
    starts = torch.empty(batch_size, dtype=torch.long, device=corpus.device)
    while True:
        yield windows_at(corpus, starts.random_(0, len(corpus) - CONTEXT, generator=generator))


def next_token_loss(model: LlamaModel, windows: Tensor) -> Tensor:
    """Return the mean loss in nats over windows [B, L + 1], each token given those before it."""
    logits = reference.full_logits(model, windows[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def held_out_bits(model: LlamaModel, corpus: Tensor, batch_size: int) -> float:
    """Return bits per byte over all windows that do not overlap."""
    starts = torch.arange(0, len(corpus) - CONTEXT, CONTEXT, device=corpus.device)
    parts = windows_at(corpus, starts).split(batch_size)
    with torch.no_grad():
        total = torch.stack([next_token_loss(model, part) * len(part) for part in parts]).sum()
    return total.item() / len(starts) / math.log(2)


def learning_rate(progress: float) -> float:
    """Rise linearly, then fall along a cosine to a twentieth; ``progress`` runs from 0 to 1."""
    if progress < WARM_UP:
        return PEAK_RATE * progress / WARM_UP
    fall = (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2
    return PEAK_RATE * (0.05 + 0.95 * fall)


def optimise(
    parameters: list[nn.Parameter], next_loss: Callable[[], Tensor], steps: int, limit: float
) -> int:
    """Minimise ``next_loss``; return the steps taken.

    The schedule follows ``steps`` or ``limit`` seconds, whichever is closer to its end, so that a
    run that the limit ends has come down the cosine too.
    """
    fused = parameters[0].is_cuda
    optimiser = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    (group,) = optimiser.param_groups
    begin, step, seconds = time.perf_counter(), 0, 0.0
    while step < steps and seconds < limit:
        group["lr"] = learning_rate(max((step + 1) / steps, seconds / limit))
        loss = next_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        seconds = time.perf_counter() - begin
        if step % LOG_EVERY == 0 or step == steps:
            print(f"step {step}/{steps} loss {loss.item():.4f} {seconds:.0f} s", file=sys.stderr)
    return step


def train(model: LlamaModel, corpus: Tensor, options: argparse.Namespace) -> int:
    """Train on random windows, in bfloat16 on CUDA; return the steps taken."""
    windows = random_windows(corpus, options.batch, options.seed)
    loss_of = torch.compile(next_token_loss) if options.compile else next_token_loss

    def next_loss() -> Tensor:
        with torch.autocast(corpus.device.type, torch.bfloat16, enabled=corpus.is_cuda):
            return loss_of(model, next(windows))

    return optimise(list(model.parameters()), next_loss, options.steps, options.limit_seconds)


def main(argv: list[str] | None = None) -> int:
    """Train, save, measure the saved weights, and report."""
    options, begin = parse(argv), time.perf_counter()
    device: torch.device = options.device
    torch.manual_seed(options.seed)
    corpus = read_corpus(options.source, held_out=False).to(device)
    held_out = read_corpus(options.source, held_out=True).to(device)
    model = LlamaModel(CONFIG)
    reference.initialise(model, CONFIG.num_hidden_layers)
    steps = train(model.to(device), corpus, options)
    reference.save_checkpoint(model.bfloat16(), options.out)
    saved = reference.load_checkpoint(options.out, device=device, dtype=torch.bfloat16)
    facts = {
        "held_out_bits_per_byte": round(held_out_bits(saved, held_out, options.batch), 4),
        "seed": options.seed,
        "steps": steps,
        "tokens": steps * options.batch * CONTEXT,
        "corpus_bytes": len(corpus),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "seconds": round(time.perf_counter() - begin, 1),
    }
    (options.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the byte-level reference model.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--out", type=Path, default=reference.default_checkpoint(), help="folder to write")
    add("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="what to learn")
    add("--steps", type=int, default=1500)
    add("--batch", type=int, default=64, help=f"windows of {CONTEXT} tokens per step")
    add("--device", type=torch.device, default=device)
    add("--seed", type=int, default=0)
    add("--limit-seconds", type=float, default=math.inf, help="stop training by then")
    add("--compile", action="store_true", help="use torch.compile")
    options = parser.parse_args(argv)
    if min(options.steps, options.batch, options.limit_seconds) <= 0:
        parser.error("--steps, --batch and --limit-seconds must be above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
