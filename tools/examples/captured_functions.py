"""Functions without speculation: an encoder, a diffusion loop and a vision model.

``gk.capture`` needs no declaration: it learns the arguments and results of a function from an
example. Batches of any size up to the largest replay a graph, and equal the function itself.

graphkit audit tools.examples.captured_functions:encoder
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from transformers import BertConfig, BertModel

import graphkit as gk

SIZES = [1, 2, 4, 8]


class UNet(nn.Module):
    """A small denoiser of images: a level down and up, a skip connection, a time embedding."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.time = nn.Linear(1, channels)
        self.inner = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.outer = nn.Conv2d(2 * channels, 3, 3, padding=1)

    def forward(self, images: torch.Tensor, noise_levels: torch.Tensor) -> torch.Tensor:
        """Return the noise in each image, [B, 3, H, W]; ``noise_levels`` is [B]."""
        hidden = self.inner(images) + self.time(noise_levels[:, None])[..., None, None]
        hidden = nn.functional.silu(self.norm(hidden))
        return self.outer(torch.cat([hidden, self.up(self.down(hidden))], 1))


def denoise(
    model: nn.Module, images: torch.Tensor, now: torch.Tensor, then: torch.Tensor
) -> torch.Tensor:
    """Take one step of DDIM from noise level ``now`` to ``then``, both [B]."""
    noise, step = model(images, now), lambda level: level[:, None, None, None]
    clean = (images - step(now) * noise) / (1 - step(now))
    return (1 - step(then)) * clean + step(then) * noise


def diffuse(
    step: Callable[..., torch.Tensor], images: torch.Tensor, num_steps: int
) -> torch.Tensor:
    """Denoise images in steps; the result of a step is an argument of the next one."""
    levels = torch.linspace(0.9, 0, num_steps + 1, device=images.device)
    for now, then in pairwise(levels):
        images = step(images, now.expand(len(images)), then.expand(len(images)))
    return images


def bert(device: str) -> BertModel:
    """Create a small random BERT."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=64,
    )  # fmt: skip
    return BertModel(config).to(device).eval()


def texts(count: int, device: str) -> dict[str, torch.Tensor]:
    """Return random texts of several lengths, padded to 16 tokens."""
    lengths = torch.randint(2, 17, (count, 1))
    mask = (torch.arange(16) < lengths).long()
    ids = torch.randint(1000, (count, 16)) * mask
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def encoder(device: str = "cpu") -> gk.CaptureTarget:
    """Create a target of the encoder, for the commands."""
    with gk.capture(bert(device), texts(4, device), batch_sizes=SIZES) as encode:
        return encode.target


def main() -> int:
    """Run five texts and images at batch size 8, and compare with the functions themselves."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    results = []
    # Convolutions in TF32 may round differently for another batch size.
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        model, batch = bert(device), texts(5, device)
        with gk.capture(model, texts(4, device), batch_sizes=SIZES) as encode:
            hidden = encode(**batch).last_hidden_state
            results.append(("encoder", hidden, model(**batch).last_hidden_state))

        step = partial(denoise, UNet().to(device).eval())
        images, levels = torch.randn(5, 3, 16, 16, device=device), torch.rand(5, device=device)
        with gk.capture(step, (images, levels, levels / 2), batch_sizes=SIZES) as captured:
            results.append(("diffusion", diffuse(captured, images, 4), diffuse(step, images, 4)))

        vision = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
        ).to(device).eval()  # fmt: skip
        with gk.capture(vision, images, batch_sizes=SIZES) as classify:
            results.append(("vision", classify(images), vision(images)))
    is_wrong = False
    for name, got, expected in results:
        equals = torch.allclose(got, expected, rtol=1e-3, atol=1e-3)
        print(f"{name}: {list(got.shape)} {'equals' if equals else 'differs from'} the function")
        is_wrong |= not equals
    return int(is_wrong)


if __name__ == "__main__":
    raise SystemExit(main())
