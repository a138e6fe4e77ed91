"""Models that ranks split. Every rank runs every function; see ``rank_processes``."""

from __future__ import annotations

import importlib
import itertools
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from training.folders import save_draft_head
from transformers import LlamaConfig

import graphkit as gk
from causal_attention import causal_attend, run_head
from engine_target import CONTEXT, ROWS, SIZES, TableForward
from graphkit.distributed.collectives import Collectives
from graphkit.models import random_model, reference_engine, reference_target, shapes
from graphkit.models.heads.eagle import Eagle3Head, EagleHead
from graphkit.models.heads.load import head_sources, load_head
from graphkit.models.tokenizer import encode
from graphkit.ops.decoder import add_rms_norm
from graphkit.ops.loop_layout import LoopEnd
from rank_steps import rank_device, rank_group
from small_llama import small_llama


def is_same_on_all_ranks(tensor):
    """Return whether every rank has the same bits."""
    both = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(both, tensor.contiguous())
    return all(torch.equal(each, tensor) for each in both)


def split_every_head():
    """Draft heads that are read in parts have the results of whole ones."""
    group = rank_group(same_batch=True)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads_of = {"head_dim": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    whole, split = (small_llama(**sizes, **heads_of, group=each) for each in (None, group))
    sources = head_sources(whole.model, whole.layout)
    config = LlamaConfig(
        **{**sizes, "num_hidden_layers": 1}, **heads_of, max_position_embeddings=64
    )
    biased = replace(config, attention_bias=True)
    heads = (
        EagleHead(config, sources, fc_bias=True),
        EagleHead(biased, sources),
        Eagle3Head(config, sources, aux_layers=(0, 1, 2), draft_vocab_size=13),
    )
    for head in heads:
        for parameter in head.requires_grad_(False).parameters():
            parameter.normal_(0.0, 0.3)
        with tempfile.TemporaryDirectory() as folder:
            save_draft_head(head, Path(folder))
            loaded = load_head(
                head.algorithm, folder, head_sources(split.model, split.layout, group)
            )
        expected, got = (results_of(each) for each in (head, loaded))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=head.algorithm)
        assert all(is_same_on_all_ranks(each) for each in got)
        assert loaded.prepare().attention[0].heads * group.size == config.num_key_value_heads


def results_of(head):
    """Return the hidden states and the logits of a draft head for seven rows of one request."""
    ids, positions, attend = torch.arange(7), torch.arange(7), causal_attend(1, 7)
    size = head.fc.in_features if isinstance(head, Eagle3Head) else 16
    hidden = torch.linspace(-1, 1, 7 * size).view(7, size)
    out = run_head(head, ids, hidden, positions, attend)
    results = out, head.logits(out)
    if isinstance(head, Eagle3Head):
        results += run_head(head.predict, ids, hidden, positions, attend)
    return results


def run_random_parts():
    """A shape with random weights is split, the draft head too."""
    group = rank_group(same_batch=True)
    settings = {**shapes.SHAPES["tiny"], "num_key_value_heads": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "SHAPES", {"tiny": settings})
        model = random_model("tiny", device=rank_device(), group=group)
    assert model.group is group
    assert model.draft.layout.attention[0].heads * group.size == 2
    (request,) = model.engine(max_context_len=48).generate(
        [[1, 2, 3]], gk.SamplingParams(max_new_tokens=8)
    )
    assert len(request.output_ids) == 8


def replay_a_split_model(*, one_shot=False):
    """Every mode of the reference model is captured with its collectives, equal on all ranks."""
    group, device = rank_group(same_batch=True, one_shot=one_shot), rank_device()
    options = {"max_batch_size": 2}
    whole = reference_target(str(device), **options)
    target = reference_target(str(device), group=group, **options)
    for mode in target.forwards:
        batch = target.batch(mode, 2, 1)
        with target.runner(mode, batch_sizes=[2]) as made:
            made.capture()
            replayed = made.replay(batch, clone=True).tensors()
            padded = made.run_padded(batch).tensors()
        with whole.runner(mode, batch_sizes=[2]) as unsplit:
            expected = unsplit.fall_back(whole.batch(mode, 2, 1)).tensors()
        for name, tensor in replayed.items():
            assert torch.equal(tensor, padded[name]), (mode, name)
            assert is_same_on_all_ranks(tensor), (mode, name)
            # The models run in bfloat16 on CUDA, where ranks round their summands.
            near = 0.1 if device.type == "cuda" else 1e-3
            torch.testing.assert_close(tensor, expected[name], rtol=near, atol=near)


def replay_a_split_model_in_one_shot():
    """The same without NCCL."""
    replay_a_split_model(one_shot=True)


def add_and_gather_in_one_shot():
    """Sums and gathers are exact: of small tensors, of larger ones, and of summands in parts."""
    group, device = rank_group(same_batch=True, one_shot=True), rank_device()
    sizes = itertools.product((torch.float32, torch.bfloat16), (1, 100, 5000))
    for dtype, rows in sizes:
        # Small integers: their sums are exact in bfloat16.
        x = (torch.arange(rows * 1024, device=device) % 7).view(rows, 1024).to(dtype)
        mine, ranks = x * (group.rank + 1), range(1, group.size + 1)
        gathered = group.collectives.all_gather(mine)
        assert torch.equal(gathered, torch.cat([x * rank for rank in ranks], 1))
        assert torch.equal(group.collectives.all_reduce(mine), x * sum(ranks))
        weight = torch.linspace(0.5, 2.0, 1024, device=device).to(dtype)
        for residual in (x + 1, x.flip(1)):
            mine = x * (group.rank + 1)  # a sum may overwrite it
            got = group.collectives.add_rms_norm(mine, residual, weight, 1e-5)
            expected = add_rms_norm(x * sum(ranks), residual, weight, 1e-5)
            torch.testing.assert_close(got, expected)
            assert torch.equal(got[1], expected[1])
            if group.collectives.takes_parts(rows, 1024, dtype):
                parts = torch.stack([x.float() * group.rank, x.float()])
                got = group.collectives.add_rms_norm(parts, residual, weight, 1e-5)
                torch.testing.assert_close(got, expected)
                assert torch.equal(got[1], expected[1])
    _capture_large_tensors_without_nccl(group, device)


def _capture_large_tensors_without_nccl(group, device):
    """Tensors of more than the shared memory, as the logits of many rows, may be in a loop."""
    x = (torch.arange(5000 * 1024, device=device) % 7).view(5000, 1024).float()
    mine, ranks, graph = x * (group.rank + 1), range(1, group.size + 1), torch.cuda.CUDAGraph()
    with (
        patch.object(Collectives, "all_gather", side_effect=AssertionError),
        patch.object(Collectives, "all_reduce", side_effect=AssertionError),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        gathered, summed = group.collectives.all_gather(mine), group.collectives.all_reduce(mine)
    graph.replay()
    assert torch.equal(gathered, torch.cat([x * rank for rank in ranks], 1))
    assert torch.equal(summed, x * sum(ranks))
    torch.cuda.synchronize()


def refuse_one_shot():
    """Without NCCL there are no one-shot collectives."""
    with pytest.raises(gk.ConfigError, match="CUDA devices and NCCL") as caught:
        rank_group(one_shot=True)
    assert caught.value.field == "one_shot"


PROMPTS = ("def __init__(self", "import os\nimport ", "for i in range(", "class A(object):\n")


def generated(generation, group, steps_per_launch=16):
    """Return what an engine generates: two requests run, two wait, and one of each is aborted."""
    engine = reference_engine(
        "EAGLE", num_steps=3, max_batch_size=2, max_context_len=160, batch_sizes=[1, 2],
        device=rank_device(), generation=generation, group=group, steps_per_launch=steps_per_launch,
    )  # fmt: skip
    with engine:
        engine.capture()
        if group is not None and dist.get_rank():
            engine.worker_loop()
            return engine.stats, []
        sampled = gk.SamplingParams(max_new_tokens=24, temperature=0.8, seed=5)
        greedy = gk.SamplingParams(max_new_tokens=24)
        processed = gk.SamplingParams(
            max_new_tokens=24, repetition_penalty=1.1, min_tokens=24, stop_token_ids=[10, 40],
            logit_bias={32: -math.inf, 95: 1.5}, logprobs=True,
        )  # fmt: skip
        requests = [
            engine.submit(encode(prompt), sampling)
            for prompt, sampling in zip(PROMPTS, (greedy, sampled, processed, greedy), strict=True)
        ]
        while engine.has_work:
            if len(requests[0].output_ids) > 8:
                engine.abort(requests[0])
                engine.abort(requests[3])
            engine.step()
        return engine.stats, [(each.output_ids, each.finish_reason) for each in requests]


def generate_on_all_ranks(*, one_shot=False):
    """A split target gives the tokens of a whole one in every generation, and in loops."""
    group = rank_group(same_batch=True, one_shot=one_shot)
    _, expected = generated("v2", None) if group.rank == 0 else (None, [])
    for generation, *steps_per_launch in (("v1",), ("v2",), ("v3", 1), ("v3", 3), ("v3", 16)):
        stats, got = generated(generation, group, *steps_per_launch)
        assert not stats.fallbacks, (generation, stats.fallbacks)
        assert stats.new_tokens > 40
        if generation == "v3":
            assert set(stats.replays) == {"STEP"}
        for (tokens, reason), (others, expected_reason) in zip(got, expected, strict=True):
            # Each generation is at another token then; loops may even have ended the request.
            is_cut = gk.FinishReason.ABORTED in (reason, expected_reason)
            assert reason is expected_reason or is_cut
            count = min(len(tokens), len(others)) if is_cut else None
            assert tokens[:count] == others[:count], generation


def generate_in_one_shot():
    """The same without NCCL, so that loops run on GPUs."""
    generate_on_all_ranks(one_shot=True)


def loop_in_one_shot():
    """Loops on GPUs."""
    loop_on_all_ranks(one_shot=True)


def loop_on_all_ranks(*, one_shot=False):
    """Loops of all ranks end after the same step, also if one host stops one or does not read."""
    group = rank_group(same_batch=True, one_shot=one_shot)
    runner = reference_engine(
        "EAGLE", num_steps=3, max_batch_size=2, max_context_len=160, batch_sizes=[1, 2],
        device=rank_device(), generation="v3", steps_per_launch=2, group=group,
    ).runners[0]  # fmt: skip
    runner.capture()
    runner.spec_step.context.req_to_token[1:3] = torch.arange(1, 321).view(2, 160)
    for row, limit in ((1, 120), (2, 40)):
        runner.admit(row, encode(PROMPTS[row]), max_new_tokens=limit)

    def run(expected, stops=False, reads=True, **options):
        stream = runner.launch([1, 2], **options)
        if stops and group.rank:
            stream.stop()
        if not reads and group.rank:
            runner.join_loops()
            torch.cuda.synchronize() if rank_device().type == "cuda" else None
        found = [[(each.req_pool_index, each.tokens) for each in step.requests] for step in stream]
        of_ranks = [None] * group.size
        dist.all_gather_object(of_ranks, (found, stream.end))
        assert of_ranks == [(found, expected)] * group.size, of_ranks
        return len(found)

    assert run(LoopEnd.STEPS, max_steps=3) == 3
    assert run(LoopEnd.STOPPED, stops=True, max_steps=40) < 40
    assert run(LoopEnd.REQUEST, until=[2], max_steps=40) < 40
    assert run(LoopEnd.RING_FULL, reads=False, max_steps=40) == 8, "entries of the ring"
    runner.close()


def engine_of_tables(group, shift):
    """Return an engine without drafts whose tokens are shifted."""

    class Shifted(TableForward):
        def __call__(self, inputs):
            output = super().__call__(inputs)
            return gk.ForwardOutput(next_token_logits=output.next_token_logits.roll(shift, 1))

    requests = gk.ReqToTokenPool(ROWS, CONTEXT, torch.device("cpu"))
    pool = gk.MHATokenToKVPool(ROWS * CONTEXT, 1, torch.float32, 1, 1, 1, torch.device("cpu"))
    model = gk.EngineModel(Shifted(pool, "cpu"), gk.SdpaAttention(requests, pool))
    spec = gk.SpecConfig("NONE", 0, 1, 1)
    return gk.SpeculativeEngine(model, spec=spec, sizes=SIZES, device="cpu", group=group)


def find_ranks_that_diverge():
    """Ranks whose tokens differ end with an error that names rank and step."""
    group = rank_group(same_batch=True)

    def work():
        with engine_of_tables(group, shift=group.rank) as engine:
            if group.rank:
                engine.worker_loop()
            engine.generate([[1, 2, 3]], gk.SamplingParams(max_new_tokens=64))

    with pytest.raises(gk.RankError, match="rank 1 generated other tokens than rank 0 in step 0"):
        work()


def make_the_same_calls():
    """Ranks may make equal calls themselves; ones that differ are named."""
    group = rank_group(same_batch=True)
    with pytest.raises(gk.ConfigError, match="same_batch"):
        engine_of_tables(rank_group(), 0)
    with engine_of_tables(group, shift=0) as engine:
        engine.capture()
        (request,) = engine.generate([[1, 2, 3]], gk.SamplingParams(max_new_tokens=40))
        assert len(request.output_ids) == 40
        if group.rank == 0:
            with pytest.raises(gk.ReplayError, match="other than 0"):
                engine.worker_loop()

    def work():
        with engine_of_tables(group, shift=0) as engine:
            engine.submit([1 + group.rank, 2])
            engine.step()
            engine.step()

    with pytest.raises(gk.RankError, match="rank 1 made other calls"):
        work()


class Letters:
    """Decodes token 0 to a, 1 to b and so on."""

    def decode(self, ids):
        return "".join(chr(ord("a") + token) for token in ids)


def serve_from_a_thread_of_rank_0():
    """Requests of a thread end on all ranks for the same reason."""
    group = rank_group(same_batch=True)
    with engine_of_tables(group, shift=0) as engine:
        engine.capture()
        if group.rank:
            engine.worker_loop()
        else:
            with gk.EngineThread(engine, Letters()) as thread:
                long = gk.SamplingParams(max_new_tokens=40)
                whole = thread.submit([1, 2], long)
                text = "".join(output.text for output in whole)
                stopped = thread.submit([1, 2], long, stop=[text[5:8]])
                late = thread.submit([3], long, timeout_s=1e-9)
                assert "".join(output.text for output in stopped) == text[:5]
                assert list(late) == []
                aborted = thread.submit([4], long)
                aborted.abort()
                list(aborted)
                assert thread.drain()
    reasons = {gk.FinishReason.LENGTH, gk.FinishReason.STOP_STRING, gk.FinishReason.DEADLINE}
    assert reasons <= set(engine.stats.finished)
    assert engine.stats.finished.total() == 4


def end_with_an_error_of_rank_0():
    """An error of rank 0 ends ``worker_loop`` of the others."""
    group = rank_group(same_batch=True)

    def work():
        with engine_of_tables(group, shift=0) as engine:
            engine.capture()
            if group.rank:
                engine.worker_loop()
            else:
                engine.submit([1, 2])
                engine.step()
                raise LookupError("no such user")

    with pytest.raises(gk.RankError if group.rank else LookupError, match="no such user"):
        work()


def serve_with_data_parallelism():
    """Ranks with batches of their own compute the rows of one process, without graphs and idle."""
    example = importlib.import_module("tools.examples.data_parallel")
    group, device = rank_group(), rank_device()
    requests, served, stats = example.serve(group, device)
    _, expected, _ = example.serve(None, device)
    torch.testing.assert_close(served, expected[requests], rtol=1e-4, atol=1e-4)
    lengths = [example.LENGTHS[request] for request in requests]
    assert served.any(-1).sum(-1).tolist() == lengths
    # Rank 0 has five requests in its first 6 steps, rank 1 none in the last ones.
    steps = max(example.LENGTHS)
    assert (sum(stats.fallbacks.values()), stats.agreements) == (6, steps)
    assert (stats.replays, stats.idle) == (steps - 6, steps - max(lengths))
