"""Speculative decoding of a transformers Mamba: recurrent states in a RecurrentStatePool.

A rejected draft token must leave no trace in the states. The forward therefore stores the states
after every node of a verify step, and the engine commits those of the last accepted node.

python -m tools.examples.mamba
graphkit audit tools.examples.mamba:target
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, softplus
from transformers import MambaConfig, MambaForCausalLM

import graphkit as gk
from graphkit.engine import EngineModel, NgramDrafter
from graphkit.engine.attention import SdpaAttention
from graphkit.engine.kv import MHATokenToKVPool, RecurrentStatePool, ReqToTokenPool
from graphkit.graphs import resolve_device

REQUESTS, CONTEXT, WIDTH, VOCAB = 4, 96, 4, 128
SPEC = gk.SpecConfig("NGRAM", WIDTH - 1, 1, WIDTH, linear_attention=True)


def small_mamba() -> MambaForCausalLM:
    """Create a Mamba with two layers and random weights."""
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, initializer_range=0.6
    )
    return MambaForCausalLM(config).eval().requires_grad_(False)


def mix(mixer: Any, states: Any, row: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Advance one Mamba layer by one token: [B, 2 * inner] to its states and [B, inner]."""
    x, gate = row.chunk(2, -1)
    window = torch.cat([states["conv"], x[:, :, None]], 2)
    x = mixer.act((window * mixer.conv1d.weight[:, 0]).sum(2) + mixer.conv1d.bias)
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    step, b, c = mixer.x_proj(x).split(sizes, -1)
    step = softplus(linear(step, mixer.dt_proj.weight, mixer.dt_proj.bias))[:, :, None]
    decay = torch.exp(step * -torch.exp(mixer.A_log))
    ssm = states["ssm"] * decay + step * b[:, None] * x[:, :, None]
    y = (ssm * c[:, None]).sum(2) + mixer.D * x
    return {"conv": window[:, :, 1:], "ssm": ssm}, y * mixer.act(gate)


class MambaForward:
    """The forward of the target, over states in a pool.

    Args:
        model: The model.
        width: Nodes per request in a verify step.
        requests: Requests that may run at once.
    """

    def __init__(self, model: MambaForCausalLM, width: int, requests: int = REQUESTS) -> None:
        self.model, config = model, model.config
        inner = config.intermediate_size
        self.states = RecurrentStatePool(
            requests, width, config.num_hidden_layers, model.device,
            shapes={"conv": (inner, config.conv_kernel - 1), "ssm": (inner, config.state_size)},
        )  # fmt: skip

    def __call__(self, inputs: gk.TargetVerifyInputs) -> gk.ForwardOutput:
        """Return the logits of every row, for a chunk of a prompt, a chain or a tree."""
        backbone, slots = self.model.backbone, self.states.slots(inputs)
        hidden = backbone.embeddings(inputs.input_ids)
        for index, layer in enumerate(backbone.layers):
            rows = layer.mixer.in_proj(layer.norm(hidden))
            mixed = self.states.scan(index, slots, partial(mix, layer.mixer), rows)
            hidden = hidden + layer.mixer.out_proj(mixed)
        return gk.ForwardOutput(next_token_logits=self.model.lm_head(backbone.norm_f(hidden)))


def engine_model(forward: MambaForward, requests: int = REQUESTS) -> EngineModel:
    """Describe the target to an engine; it has no layer with a KV cache."""
    device = forward.model.device
    pools = (
        ReqToTokenPool(requests, CONTEXT, device),
        MHATokenToKVPool(requests * CONTEXT, 1, torch.float32, 1, 1, 0, device),
    )
    return EngineModel(forward, SdpaAttention(*pools), forward.states)


def engine_of(model: MambaForCausalLM, **options: Any) -> gk.SpeculativeEngine:
    """Create an engine with states of its own; ``options`` are those of ``SpeculativeEngine``."""
    target = engine_model(MambaForward(model, WIDTH))
    options = {"device": model.device, **options}
    return gk.SpeculativeEngine(target, NgramDrafter(), spec=SPEC, sizes=sizes(model), **options)


def sizes(model: MambaForCausalLM) -> gk.BufferSizes:
    """Return the sizes of the buffers."""
    return gk.BufferSizes(REQUESTS, CONTEXT, model.config.hidden_size, VOCAB, torch.float32)


def sample_batch(_mode: gk.ForwardMode, batch_size: int, seed: int) -> gk.TargetVerifyInputs:
    """Return a batch of chains, deterministic for the same arguments."""
    random = np.random.default_rng([seed, batch_size])
    rows = 1 + random.permutation(REQUESTS)[:batch_size]
    lengths = random.integers(1, CONTEXT - WIDTH, batch_size)
    positions = lengths[:, None] + np.arange(WIDTH)
    return gk.TargetVerifyInputs(
        req_pool_indices=rows,
        seq_lens=lengths,
        input_ids=random.integers(0, VOCAB, batch_size * WIDTH),
        positions=positions.ravel(),
        out_cache_loc=(1 + (rows[:, None] - 1) * CONTEXT + positions).ravel(),
    )


def target(device: str = "auto") -> gk.CaptureTarget:
    """Create the target; commands call this factory."""
    model = small_mamba().to(resolve_device(device))
    forward = MambaForward(model, WIDTH)
    return gk.CaptureTarget(
        name="Mamba",
        spec=SPEC,
        sizes=sizes(model),
        forwards={gk.ForwardMode.TARGET_VERIFY: forward},
        sample_batch=sample_batch,
        weights=model,
        mutable_state=forward.states.tensors(),
        engine=partial(engine_of, model),
    )


def main() -> int:
    """Compare speculative decoding with the model's own greedy decoding, and print both."""
    model, prompt, count = small_mamba(), [5, 17, 3, 17, 3], 24
    with engine_of(model) as engine:
        engine.capture()
        (request,) = engine.generate([prompt], gk.SamplingParams(max_new_tokens=count))
        accepted = engine.stats.accept_length
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    equal = request.output_ids == expected[0, len(prompt) :].tolist()
    print(f"{len(request.output_ids)} tokens, {accepted:.2f} per step, equal: {equal}")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
