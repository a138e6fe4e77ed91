"""Cost of a replay: CUDA calls, allocations, memory of all sizes."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import graphkit as gk
from graphkit.graphs.driver import runtime

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(runtime() is None, reason="needs cuda-bindings")
def test_a_replay_is_one_cuda_call(make_runner, make_batch):
    runner = make_runner()
    runner.capture()
    batch = make_batch(3, 1)
    runner.replay(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as seen:
        for _ in range(5):
            runner.replay(batch)
    names = [e.name for e in seen.events() if e.name.startswith("cu")]
    calls = [name for name in names if name.startswith("cuda") and "Synchronize" not in name]
    assert calls == ["cudaGraphLaunch"] * 5


def test_a_replay_allocates_nothing(make_runner, make_batch):
    runner = make_runner()
    runner.capture()
    batches = [make_batch(requests, 1) for requests in (1, 3, 16)]
    for batch in batches:
        runner.replay(batch)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for batch in batches:
        runner.replay(batch)
        runner.stage(batch.batch_size)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_smaller_sizes_reuse_the_memory_of_the_largest():
    def step(inputs):
        hidden = inputs.input_embeds
        for _ in range(4):
            hidden = torch.relu(hidden @ weight)
        return gk.ForwardOutput(next_token_logits=hidden.repeat(1, 8), hidden_states=hidden)

    weight = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)

    def pool_of(sizes):
        runner = gk.TargetVerifyRunner(
            step,
            spec=gk.SpecConfig("EAGLE", num_steps=7, topk=1, num_draft_tokens=8),
            sizes=gk.BufferSizes(256, 128, 1024, 8192, torch.bfloat16),
            batch_sizes=sizes,
            optional_fields=["input_embeds"],
            backend=gk.CudaBackend(),
        )
        with runner:
            runner.capture()
            return runner.backend.pool.num_bytes()

    assert pool_of(None) <= 1.1 * pool_of([256])
