"""Values of a wrong type, for every argument of every public callable: a GraphkitError or nothing.

Each call below is valid. Each of its arguments is replaced by each wrong value in turn.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.audit.foreign import GraphDigest
from graphkit.engine.attention import SdpaAttention
from graphkit.runners.targets import selected_modes
from graphkit.testing import assert_replay_equivalent, assert_target_equivalent

WRONG = [None, 5, -1, 1.5, True, "x", [], (), {}, object()]
VERIFY, VOCAB = gk.ForwardMode.TARGET_VERIFY, 32
SPEC = gk.SpecConfig("EAGLE", 3, 1, 4)
SIZES = gk.BufferSizes(2, 16, 8, VOCAB, torch.float32)


@dataclass(kw_only=True, eq=False)
class HeadInputs(gk.StepInputs):
    rows: gk.Rows = gk.declare(gk.Axis.REQUEST, torch.int64, "row in the request pool")


@dataclass(kw_only=True, eq=False)
class HeadOutput(gk.Output):
    logits: torch.Tensor = gk.declare_output(gk.Axis.REQUEST, row=("V",))


def forward(inputs):
    logits = torch.nn.functional.embedding(inputs.input_ids, torch.eye(VOCAB))
    return gk.ForwardOutput(next_token_logits=logits)


def sample_batch(mode=VERIFY, batch_size=2, seed=0):
    rows = 4 * batch_size
    return gk.TargetVerifyInputs(
        req_pool_indices=np.arange(1, batch_size + 1),
        seq_lens=np.full(batch_size, 3),
        input_ids=(np.arange(rows) + seed) % VOCAB,
        positions=3 + np.arange(rows) % 4,
        out_cache_loc=np.arange(1, rows + 1),
    )


TARGET = {
    "name": "tiny", "spec": SPEC, "sizes": SIZES, "forwards": {VERIFY: forward},
    "sample_batch": sample_batch, "weights": None, "mutable_state": None, "host_values": {},
    "attention": None, "batch_sizes": [2], "optional_fields": None, "inputs_type": None,
    "output_type": None, "served_modes": None,
}  # fmt: skip
RUNNER = {
    "forward": forward, "spec": SPEC, "sizes": SIZES, "batch_sizes": [2], "device": "cpu",
    "backend": None, "multiple_of": 1, "optional_fields": None, "bound_fields": None,
    "mutable_state": None, "check": None,
}  # fmt: skip
POOL = {"size": 4, "page_size": 1, "dtype": torch.float32, "layer_num": 1, "device": "cpu"}
LATENT = POOL | {"kv_lora_rank": 2, "qk_rope_head_dim": 2}
MODES = [name for name in gk.__all__ if name.endswith("Runner") and name != "Runner"]


def whole_step() -> dict[str, Any]:
    """Return the arguments of a step over pools of its own."""
    requests = gk.ReqToTokenPool(2, 16, "cpu")
    pool = gk.MHATokenToKVPool(**POOL | {"size": 32}, head_num=1, head_dim=2)
    return {
        "target": gk.EngineModel(forward, SdpaAttention(requests, pool)),
        "drafter": gk.NgramDrafter(), "spec": SPEC, "sizes": SIZES, "batch_sizes": [2],
        "device": "cpu",
    }  # fmt: skip


class Digits:
    def decode(self, ids):
        return "".join(map(str, ids))

    def encode(self, text):
        return [*map(int, text)]

    def encode_chat(self, messages):
        return self.encode("".join(message["content"] for message in messages))

    def sampling_params(self, **changes):
        return gk.SamplingParams(**changes)


def close_thread(**options):
    thread = gk.EngineThread(**options)
    thread.close()
    return thread


@cache
def calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return every call by name: a callable and its valid arguments."""
    target = gk.CaptureTarget(**TARGET)
    runner = target.runner(VERIFY, device="cpu")
    runner.capture()
    requests, pool = (
        gk.ReqToTokenPool(2, 16, "cpu"),
        gk.MHATokenToKVPool(**POOL, head_num=1, head_dim=2),
    )
    attention = SdpaAttention(requests, pool)
    engine_model = gk.EngineModel(forward, attention)
    engine = gk.SpeculativeEngine(**whole_step())
    steps = gk.SpecStepRunner(**whole_step())
    table = steps.spec_step.context.req_to_token
    table[1:] = 1 + torch.arange(table[1:].numel(), dtype=torch.int32).view_as(table[1:])
    future_map = gk.FutureMap(2, 8, 16, "cpu", "EAGLE")
    future_map.stash(torch.ones(1).long(), {"rows": torch.ones(1)})
    buffers = {
        "capacity": runner.buffers.capacity, "device": torch.device("cpu"), "inputs_type": None,
        "optional_fields": (), "without": (), "bound_fields": None,
    }  # fmt: skip
    pools = {"req_to_token_pool": requests, "kv_pool": pool, "scale": None}
    step = RUNNER | {"attention": None, "inputs_type": None}
    chain = step | {"forward": [forward] * 3, "num_front_tokens": 0}
    head = RUNNER | {"inputs": HeadInputs, "output": HeadOutput, "tokens_per_request": None}
    batch = {"batch": sample_batch(), "padded_batch_size": 2}
    limits = {"tolerance": 1.0, "rtol": None, "atol": None}
    field = {"axis": gk.Axis.REQUEST, "dtype": torch.int64, "row": (), "optional": False}
    modes = {"modes": [VERIFY], "batch_sizes": [2], "device": "cpu"}
    return {
        "AcceptedCounts": (
            gk.AcceptedCounts,
            {"num_accepted_drafts": np.zeros(2, int), "num_accepted_tokens": np.ones(2, int)},
        ),
        "AcceptedCounts.from_tokens": (
            gk.AcceptedCounts.from_tokens,
            {"num_accepted_tokens": np.ones(2, int)},
        ),
        "Attribution": (gk.Attribution, {"modules": None, "stack_fill": 0}),
        "BufferSizes": (
            gk.BufferSizes,
            {each.name: getattr(SIZES, each.name) for each in dataclasses.fields(SIZES)},
        ),
        "CaptureTarget": (gk.CaptureTarget, TARGET),
        "CaptureTarget.batch": (target.batch, {"mode": VERIFY, "batch_size": 2, "seed": 0}),
        "CaptureTarget.runner": (
            target.runner,
            {"mode": VERIFY, "batch_sizes": [2], "device": "cpu", "backend": None},
        ),
        "CudaBackend": (gk.CudaBackend, {"device": "cuda"}),
        "CustomSpecAlgorithm": (gk.CustomSpecAlgorithm, {"name": "custom"}),
        "DFlashDrafter": (
            gk.DFlashDrafter,
            {"model": engine_model, "block_size": 4, "mask_token_id": 1},
        ),
        "DSATokenToKVPool": (gk.DSATokenToKVPool, LATENT | {"index_head_dim": 128}),
        "EagleDrafter": (gk.EagleDrafter, {"model": engine_model}),
        "EngineModel": (
            gk.EngineModel,
            {"forward": forward, "attention": attention, "recurrent_state": None},
        ),
        "FutureMap": (
            gk.FutureMap,
            {
                "max_running_requests": 2, "chunked_prefill_size": 8, "context_len": 16,
                "device": "cpu", "algorithm": "EAGLE",
            },
        ),
        "FutureMap.stash": (
            future_map.stash,
            {"req_pool_indices": torch.ones(1).long(), "results": {"rows": torch.ones(1)}},
        ),
        "InputBuffers": (gk.InputBuffers, buffers | {"inputs_type": gk.TargetVerifyInputs}),
        "MHATokenToKVPool": (gk.MHATokenToKVPool, POOL | {"head_num": 1, "head_dim": 2}),
        "MLATokenToKVPool": (gk.MLATokenToKVPool, LATENT),
        "MultiLayerDrafter": (gk.MultiLayerDrafter, {"model": engine_model}),
        "RecurrentStatePool": (
            gk.RecurrentStatePool,
            {
                "size": 2, "width": 4, "layer_num": 1, "device": "cpu", "shapes": {"sum": (2,)},
                "dtypes": torch.float32,
            },
        ),
        "ReqToTokenPool": (gk.ReqToTokenPool, {"size": 2, "max_context_len": 4, "device": "cpu"}),
        "ReqToTokenPool.alloc": (requests.alloc, {"n": 0}),
        "ReqToTokenPool.free": (requests.free, {"rows": []}),
        "Runner": (gk.Runner, step),
        "Runner.can_replay": (runner.can_replay, {"batch": sample_batch()}),
        "Runner.capture": (
            lambda **options: target.runner(VERIFY, device="cpu").capture(**options),
            {"progress": None},
        ),
        "Runner.estimate": (
            lambda **options: target.runner(VERIFY, device="cpu").estimate(**options),
            {"record": None},
        ),
        "Runner.recapture": (
            lambda **options: runner.recapture(**options).__enter__(),
            {"make_batch": None, "batch_sizes": [2], "backend": None},
        ),
        "Runner.fall_back": (runner.fall_back, {"batch": sample_batch(), "without": ()}),
        "Runner.inspect": (runner.inspect, {"batch_size": 2, "weights": None, "replay": None}),
        "Runner.replay": (runner.replay, batch),
        "Runner.run": (runner.run, batch),
        "Runner.run_padded": (runner.run_padded, batch),
        "Runner.sample_batch": (runner.sample_batch, {"batch_size": 2, "seed": 0}),
        "Runner.stage": (runner.stage, {"batch_size": 1, "num_tokens": None}),
        "SamplingParams": (
            gk.SamplingParams,
            {
                "max_new_tokens": 1, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
                "stop_token_ids": frozenset(), "seed": None, "repetition_penalty": 1.0,
                "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {3: 1.0},
                "min_tokens": 1, "logprobs": False,
            },
        ),
        "SdpaAttention": (gk.SdpaAttention, pools),
        "RankGroup": (
            gk.RankGroup, {"process_group": None, "same_batch": False, "time_limit": 1.0},
        ),
        "ShadowWatch": (
            gk.ShadowWatch, {"runner": runner, "every": 1, "weights": None, "tolerance": 1.0},
        ),
        "SizeTable": (gk.SizeTable, {"max_batch_size": 4, "batch_sizes": None, "multiple_of": 1}),
        "SizeTable.fit": (gk.SizeTable(4).fit, {"batch_size": 1}),
        "SpecConfig": (
            gk.SpecConfig,
            {each.name: getattr(SPEC, each.name) for each in dataclasses.fields(SPEC)},
        ),
        "SpecConfig.tokens_per_request": (SPEC.tokens_per_request, {"mode": VERIFY}),
        "SpecStepRunner.admit": (
            steps.admit,
            {
                "req_pool_index": 1, "prompt_ids": [1], "sampling": None, "max_new_tokens": 1,
                "num_output_tokens": 0,
            },
        ),
        "SpecStepRunner.capture": (
            lambda **options: gk.SpecStepRunner(**whole_step()).capture(**options),
            {"progress": None, "attribution": None},
        ),
        "SpecStepRunner.release": (steps.release, {"req_pool_indices": [1]}),
        "SpeculativeEngine.abort": (engine.abort, {"request": engine.submit([1])}),
        "SpeculativeEngine.capture": (engine.capture, {"progress": print}),
        "SpeculativeEngine.estimate": (engine.estimate, {"record": None}),
        "SpeculativeEngine.generate": (engine.generate, {"prompts": [[1]], "sampling": None}),
        "SpeculativeEngine.submit": (
            engine.submit, {"prompt_ids": [1], "sampling": None, "matcher": None},
        ),
        "SpeculativeEngine": (
            gk.SpeculativeEngine,
            {
                "target": engine_model, "drafter": gk.NgramDrafter(), "spec": SPEC, "sizes": SIZES,
                "batch_sizes": [2], "device": "cpu", "backend": None, "generation": None,
                "steps_per_launch": 2, "chunked_prefill_size": 8, "prefill_sizes": None,
                "bos_token_id": None, "seed": 0, "debug": False,
            },
        ),
        "EngineThread": (close_thread, {"engine": engine, "tokenizer": None, "max_waiting": None}),
        "OpenAIRequest": (
            gk.OpenAIRequest,
            {
                "thread": close_thread(engine=engine, tokenizer=Digits()), "tokenizer": Digits(),
                "body": {"prompt": "12"}, "timeout_s": None,
            },
        ),
        "TextStream": (gk.TextStream, {"tokenizer": Digits(), "prompt_ids": [1], "stop": ["9"]}),
        "TokenSlotAllocator": (
            gk.TokenSlotAllocator, {"size": 2, "page_size": 1, "device": "cpu"},
        ),
        "TokenSlotAllocator.alloc": (gk.TokenSlotAllocator(4).alloc, {"n": 0}),
        "TokenSlotAllocator.free": (gk.TokenSlotAllocator(4).free, {"slots": []}),
        "TokenToKVPool": (gk.TokenToKVPool, POOL),
        "TritonAttention": (gk.TritonAttention, pools),
        "assert_replay_equivalent": (
            partial(assert_replay_equivalent, runner, [sample_batch()]), limits,
        ),
        "assert_target_equivalent": (
            assert_target_equivalent, {"target": target, **modes, **limits},
        ),
        "audit_graphs": (gk.audit_graphs, {}),
        "audit_target": (
            gk.audit_target,
            {"target": target, **modes, "only": ["pointers"], "tolerance": 1.0, "lock": None},
        ),
        "capture": (
            gk.capture,
            {
                "fn": torch.relu, "example": torch.ones(2, 3), "batch_sizes": [2], "device": "cpu",
                "backend": None, "mutable_state": None, "weights": None, "tolerance": 1.0,
                "attribution": None,
            },
        ),
        "estimate_target": (gk.estimate_target, {"target": target, **modes, "backend": None}),
        "capture_target": (gk.capture_target, {"target": target, **modes, "backend": None}),
        "compare_digest": (
            gk.compare_digest,
            {"before": GraphDigest({}, 0), "after": GraphDigest({}, 0)},
        ),
        "declare": (gk.declare, field | {"meaning": "", "pad": 0, "lead": 0, "flat": False}),
        "declare_output": (gk.declare_output, field),
        "graph_digest": (gk.graph_digest, {}),
        "get_algorithm": (gk.get_algorithm, {"name": "EAGLE"}),
        "inspect_graph": (
            gk.inspect_graph,
            {"graph": runner.graphs[2], "names": None, "attribution": None, "replay": None},
        ),
        "load_record": (gk.load_record, {"path": "no such file"}),
        "register_algorithm": (
            gk.register_algorithm, {"name": "EAGLE", "cls": gk.CustomSpecAlgorithm},
        ),
        "scope": (lambda name: gk.scope(name).__enter__(), {"name": "sampler"}),
        "selected_modes": (selected_modes, {"target": target, "modes": [VERIFY]}),
        **{name: (getattr(gk, name), step) for name in MODES},
        "MultiLayerEagleRunner": (gk.MultiLayerEagleRunner, chain),
        "SpecStepRunner": (
            gk.SpecStepRunner,
            {
                "target": engine_model, "drafter": gk.NgramDrafter(), "spec": SPEC, "sizes": SIZES,
                "batch_sizes": [2], "device": "cpu", "backend": None, "is_greedy": False,
                "chunked_prefill_size": 8, "ring_entries": 4,
            },
        ),
        "StepRunner": (gk.StepRunner, head),
        "resolved results": (
            future_map.resolve, {"name": "rows", "req_pool_indices": torch.ones(1).long()},
        ),
    }  # fmt: skip


MADE_BY_GRAPHKIT = {
    "CapturedFunction", "RequestState", "RequestStream", "SpecStep", "StagedBatch", "StagedCall",
    "StepReport", "StepStream", "Verifier",
}  # fmt: skip
"""Classes whose instances graphkit makes."""
WITHOUT_ARGUMENTS = {
    "AttentionBackend", "Drafter", "NamedTensors", "NewTokens", "NgramDrafter", "NullDrafter",
    "PagedAttention", "PooledAttention", "RecorderBackend", "Rows",
}  # fmt: skip
"""Interfaces, types of annotations, and classes that take no argument."""
NEVER_VALID = {
    "CudaBackend", "OpenAIRequest", "RankGroup", "Runner", "audit_graphs", "graph_digest",
    "load_record", "register_algorithm",
}  # fmt: skip
"""Calls that are refused here: without a GPU, a running thread, ranks, a mode, followed graphs, a
file, or a free name."""
NAMES = sorted(calls())


def has_arguments_to_check(name):
    """Return whether a public name is a callable that checks its arguments, unlike plain data."""
    value = getattr(gk, name)
    is_class = isinstance(value, type)
    if is_class and issubclass(value, (BaseException, enum.Enum, gk.Record)):
        return False
    is_data = dataclasses.is_dataclass(value) and not hasattr(value, "__post_init__")
    return callable(value) and not is_data and not getattr(value, "_is_protocol", False)


def test_every_public_callable_is_called():
    expected = {name for name in gk.__all__ if has_arguments_to_check(name)}
    assert expected - MADE_BY_GRAPHKIT - WITHOUT_ARGUMENTS <= set(NAMES)


@pytest.mark.parametrize("name", sorted(set(NAMES) - NEVER_VALID))
def test_the_arguments_are_valid(name):
    function, valid = calls()[name]
    function(**valid)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_type_is_accepted_or_refused_by_graphkit(name):
    function, valid = calls()[name]
    refusals = (
        (gk.GraphkitError, AssertionError) if name.startswith("assert_") else gk.GraphkitError
    )
    for argument in valid:
        for value in WRONG:
            try:
                function(**valid | {argument: value})
            except refusals:
                continue
            except Exception as error:
                error.add_note(f"{name}({argument}={value!r})")
                raise
