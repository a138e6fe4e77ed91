"""Boundaries of requests: pages, the context limit, stop tokens, and invalid prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_runs import chain_and_tree, each_generation, finish, outputs, refuses
from graphkit.config import BufferSizes
from graphkit.engine import (
    EagleDrafter,
    EngineModel,
    FinishReason,
    MultiLayerDrafter,
    SamplingParams,
    SpeculativeEngine,
)
from graphkit.engine.attention import SdpaAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.errors import CaptureError, ConfigError
from graphkit.graphs import environment
from graphkit.spec import SpecConfig


def prompt_of(length):
    return [(7 * i + 3 * length) % 96 for i in range(length)]


class TestPages:
    LENGTHS, NEW = (3, 4, 5, 15, 16, 17, 31, 33), 13

    @pytest.mark.slow
    @pytest.mark.parametrize("page_size", [4, 16])
    @pytest.mark.parametrize(
        ("generation", "topk"), [("v1", 1), ("v1", 2), ("v2", 1), ("v2", 2)], ids=str
    )
    @pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE"])
    def test_a_page_may_end_anywhere_in_a_text(
        self, make_engine, plain, algorithm, generation, topk, page_size
    ):
        prompts = [prompt_of(length) for length in self.LENGTHS]
        engine = make_engine(algorithm, topk=topk, page_size=page_size, generation=generation)
        requests = engine.generate(prompts, SamplingParams(max_new_tokens=self.NEW))
        assert outputs(requests) == plain(prompts, [self.NEW] * len(prompts))

    @each_generation
    def test_a_context_need_not_be_whole_pages(self, make_engine, plain, generation):
        engine = make_engine(page_size=16, max_context_len=58, generation=generation)
        request = engine.generate([prompt_of(5)], SamplingParams(max_new_tokens=99))[0]
        assert request.finish_reason is FinishReason.CONTEXT
        assert [request.output_ids] == plain([prompt_of(5)], [engine.context_limit - 5])

    @pytest.mark.slow
    @pytest.mark.parametrize("page_size", [4, 16])
    @pytest.mark.parametrize("topk", [3, 4])  # 2 in the tests of each generation
    @pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM"])
    def test_trees_run_captured_in_v2(self, make_engine, plain, algorithm, topk, page_size):
        prompts = [prompt_of(length) for length in self.LENGTHS]
        engine = make_engine(
            algorithm, topk=topk, page_size=page_size, batch_sizes=[8], generation="v2"
        )
        engine.capture()
        requests = engine.generate(prompts, SamplingParams(max_new_tokens=self.NEW))
        assert outputs(requests) == plain(prompts, [self.NEW] * len(prompts))

    def test_pools_on_another_device_are_refused(self):
        requests = ReqToTokenPool(2, 16, "meta")
        attention = SdpaAttention(
            requests, MHATokenToKVPool(16, 1, torch.float32, 1, 16, 1, "meta")
        )
        message = r"pools of the target are on meta, but the engine runs on cpu\. Move the target"
        with refuses(ConfigError, "device", message):
            SpeculativeEngine(
                EngineModel(print, attention),
                spec=SpecConfig("NONE", 0, 1, 1),
                sizes=BufferSizes(2, 16, 16, 96, torch.float32),
                device="cpu",
            )


class TestContext:
    @pytest.mark.slow
    @chain_and_tree
    @each_generation
    def test_it_ends_requests_wherever_their_prompts_end(
        self, make_engine, plain, generation, topk
    ):
        engine = make_engine(
            "EXACT", topk=topk, generation=generation, max_context_len=40, batch_sizes=[8]
        )
        engine.capture()
        prompts = [prompt_of(engine.context_limit - left) for left in range(1, 9)]
        requests = engine.generate(prompts, SamplingParams(max_new_tokens=99))
        assert outputs(requests) == plain(prompts, list(range(1, 9)))
        assert {request.finish_reason for request in requests} == {FinishReason.CONTEXT}
        assert {request.num_tokens for request in requests} == {engine.context_limit}

    def test_a_request_may_fill_it_exactly(self, make_engine):
        engine = make_engine(max_context_len=40)
        prompt = prompt_of(10)
        request = engine.generate(
            [prompt], SamplingParams(max_new_tokens=engine.context_limit - 10)
        )[0]
        assert request.finish_reason is FinishReason.LENGTH


class TestEnds:
    @pytest.mark.slow
    @chain_and_tree
    @each_generation
    def test_a_stop_token_may_be_any_of_an_accepted_path(
        self, make_engine, plain, generation, topk
    ):
        prompt = prompt_of(30)
        text = plain([prompt], [12])[0]
        engine = make_engine("EXACT", topk=topk, generation=generation, batch_sizes=[8])
        engine.capture()
        requests = [
            engine.submit(prompt, SamplingParams(stop_token_ids=frozenset({token})))
            for token in text
        ]
        finish(engine)
        ends = [text.index(token) + 1 for token in text]
        assert ends[0] == 1, "the very first token"
        assert outputs(requests) == [text[:end] for end in ends]
        assert {request.finish_reason for request in requests} == {FinishReason.STOP}
        assert requests[-1].accept_length > 2, "paths were accepted whole"

    def test_stop_tokens_may_come_in_any_collection(self, make_engine, task):
        """Also one that can be read only once."""
        text = task.expected[2]
        for tokens in ([text[1]], (text[1],), {text[1]: "end"}, iter([text[1]])):
            sampling = SamplingParams(stop_token_ids=tokens)
            assert sampling.stop_token_ids == {text[1]}
        request = make_engine().generate([task.prompts[2]], sampling)[0]
        assert request.output_ids == text[: text.index(text[1]) + 1]

    @pytest.mark.slow
    @chain_and_tree
    @each_generation
    def test_all_requests_may_end_in_one_step(self, make_engine, task, generation, topk):
        engine = make_engine(topk=topk, generation=generation, batch_sizes=[8])
        engine.capture()
        for _ in range(2):
            requests = engine.generate([task.prompts[1]] * 8, SamplingParams(max_new_tokens=7))
            assert outputs(requests) == [task.expected[1][:7]] * 8
            assert engine.memory.held_slots == 0

    @each_generation
    def test_one_new_token_takes_no_draft(self, make_engine, task, generation):
        engine = make_engine(generation=generation)
        requests = engine.generate(task.prompts[:3], SamplingParams(max_new_tokens=1))
        assert outputs(requests) == [text[:1] for text in task.expected[:3]]
        assert engine.stats.num_verifies == 0
        assert engine.stats.new_tokens == 3

    @each_generation
    def test_the_reason_is_the_first_that_holds(self, make_engine, task, generation):
        text = task.expected[2]
        stop = SamplingParams(max_new_tokens=1, stop_token_ids=frozenset({text[0]}))
        engine = make_engine(generation=generation)
        assert engine.generate([task.prompts[2]], stop)[0].finish_reason is FinishReason.STOP


class TestCapture:
    def test_a_failed_capture_may_be_repeated(self, make_engine, task):
        """The cause may be temporary, such as a lack of memory; captured runners stay captured."""
        is_full = [True]

        def drafter(model):
            def forward(inputs):
                if is_full[0]:
                    raise RuntimeError("no room")
                return model.forward(inputs)

            return EagleDrafter(EngineModel(forward, model.attention))

        engine = make_engine(drafter=drafter, batch_sizes=[8])
        with pytest.raises(CaptureError, match="no room"):
            engine.capture()
        is_full[0] = False
        engine.capture()
        assert {runner.status for runner in engine.runners} == {"captured"}
        requests = engine.generate(task.prompts[:8], SamplingParams(max_new_tokens=6))
        assert outputs(requests) == [text[:6] for text in task.expected[:8]]
        assert engine.stats.fallbacks == {}

    @pytest.mark.parametrize(("generation", "call"), [("v1", 1), ("v2", 1), ("v3", 1), ("v3", 2)])
    def test_an_interrupted_capture_may_be_repeated(
        self, make_engine, task, monkeypatch, generation, call
    ):
        """It is interrupted after all sizes are captured: in v3, of the prologue or of the step."""
        engine = make_engine(generation=generation, batch_sizes=[8])
        calls = []

        def interrupt(device):
            calls.append(device)
            if len(calls) == call:
                raise KeyboardInterrupt
            return environment(device)

        with monkeypatch.context() as patch:
            patch.setattr("graphkit.runners.runner.environment", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.capture()
        assert {runner.status for runner in engine.runners} == {"planned"}
        engine.capture()
        requests = engine.generate(task.prompts[:8], SamplingParams(max_new_tokens=6))
        assert outputs(requests) == [text[:6] for text in task.expected[:8]]
        assert engine.stats.fallbacks == {}


def test_layers_of_a_drafter_may_be_modules(make_engine, task):
    """A ``ModuleList`` is callable but is not a forward."""

    def in_modules(model):
        layers = [torch.nn.Identity() for _ in model.forward]
        for layer, forward in zip(layers, model.forward, strict=True):
            layer.forward = forward
        return MultiLayerDrafter(replace(model, forward=torch.nn.ModuleList(layers)))

    engine = make_engine("MULTI_LAYER_EAGLE", drafter=in_modules)
    requests = engine.generate(task.prompts[:3], SamplingParams(max_new_tokens=6))
    assert outputs(requests) == [text[:6] for text in task.expected[:3]]


class TestPrompts:
    @each_generation
    @pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "NGRAM", "NONE"])
    def test_an_empty_prompt_is_the_bos_token(self, make_engine, plain, algorithm, generation):
        engine = make_engine(algorithm, generation=generation, bos_token_id=7)
        requests = engine.generate([[], [7]], SamplingParams(max_new_tokens=9))
        assert outputs(requests) == plain([[7], [7]], [9, 9])

    @pytest.mark.slow
    @pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "NGRAM"])
    @chain_and_tree
    def test_chunks_of_any_size_make_no_difference(self, make_engine, task, algorithm, topk):
        prompts = task.prompts[1:4]
        for chunk in (1, 7):  # all other tests prefill a prompt in one chunk
            engine = make_engine(algorithm, topk=topk, chunked_prefill_size=chunk)
            requests = engine.generate(prompts, SamplingParams(max_new_tokens=6))
            assert outputs(requests) == [text[:6] for text in task.expected[1:4]], chunk
