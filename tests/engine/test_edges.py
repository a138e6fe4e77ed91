"""Boundaries of requests: pages, the context limit, stop tokens, and invalid prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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
from graphkit.errors import CaptureError, ConfigError, InputError, ReplayError
from graphkit.graphs import environment
from graphkit.spec import SpecConfig

GENERATIONS = ["v1", "v2", "v3"]
chain_and_tree = pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
each_generation = pytest.mark.parametrize("generation", GENERATIONS)


def outputs(requests):
    return [request.output_ids for request in requests]


def prompt_of(length):
    return [(7 * i + 3 * length) % 96 for i in range(length)]


class TestPages:
    LENGTHS, NEW = (3, 4, 5, 15, 16, 17, 31, 33), 13

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

    @pytest.mark.parametrize("generation", ["v1", "v2", "v3", None])
    @pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
    def test_recurrent_state_without_a_commit_is_refused(self, make_engine, generation, topk):
        message = r"linear_attention is set, but the target has no commit.*would stay in it\. Pass"
        with pytest.raises(ConfigError, match=message) as caught:
            make_engine(linear_attention=True, generation=generation, topk=topk)
        assert caught.value.field == "linear_attention"

    @pytest.mark.parametrize("generation", ["v4", "V2", 2])
    def test_an_unknown_generation_is_refused(self, make_engine, generation):
        with pytest.raises(ConfigError, match="generation must be 'v1', 'v2', 'v3'") as caught:
            make_engine(generation=generation)
        assert caught.value.field == "generation"

    def test_pools_on_another_device_are_refused(self):
        requests = ReqToTokenPool(2, 16, "meta")
        attention = SdpaAttention(
            requests, MHATokenToKVPool(16, 1, torch.float32, 1, 16, 1, "meta")
        )
        message = r"pools of the target are on meta, but the engine runs on cpu\. Move the target"
        with pytest.raises(ConfigError, match=message) as caught:
            SpeculativeEngine(
                EngineModel(print, attention),
                spec=SpecConfig("NONE", 0, 1, 1),
                sizes=BufferSizes(2, 16, 16, 96, torch.float32),
                device="cpu",
            )
        assert caught.value.field == "device"


class TestContext:
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

    def test_too_long_a_prompt_is_refused(self, make_engine):
        engine = make_engine(max_context_len=40)
        with pytest.raises(
            InputError,
            match=f"has {engine.context_limit} tokens.*limited to {engine.context_limit}",
        ):
            engine.submit(prompt_of(engine.context_limit))
        assert not engine.has_work

    def test_a_context_without_room_for_a_step_is_refused(self, make_engine):
        with pytest.raises(ConfigError, match="max_context_len is 8, but two steps may write"):
            make_engine(max_context_len=8)


class TestEnds:
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
        while engine.has_work:
            engine.step()
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

    @pytest.mark.parametrize("tokens", [5, None, [[5]]])
    def test_invalid_stop_tokens_are_refused(self, tokens):
        """At construction: in the middle of a step the error would affect the whole batch."""
        with pytest.raises(
            ConfigError, match="stop_token_ids must be a collection of token ids"
        ) as caught:
            SamplingParams(stop_token_ids=tokens)
        assert caught.value.field == "stop_token_ids"

    @pytest.mark.parametrize("token", [-1, 2**63, 2**70, -(2**70)])
    def test_stop_tokens_are_token_ids(self, token):
        with pytest.raises(ConfigError, match="expected token ids from 0 to 2") as caught:
            SamplingParams(stop_token_ids=[3, token])
        assert caught.value.field == "stop_token_ids"

    @each_generation
    @pytest.mark.parametrize("token", [96, 2**63 - 1])
    def test_a_stop_token_outside_the_vocabulary_is_refused_alone(
        self, make_engine, task, generation, token
    ):
        engine = make_engine(generation=generation)
        request = engine.submit(task.prompts[0], SamplingParams(max_new_tokens=13))
        with pytest.raises(InputError, match=f"has {token}, but the vocabulary has 96") as caught:
            engine.submit([1], SamplingParams(stop_token_ids=[95, token]))
        assert caught.value.field == "stop_token_ids"
        while engine.has_work:
            engine.step()
        assert request.output_ids == task.expected[0]

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
        faults = [RuntimeError("no room")]

        def drafter(model):
            def forward(inputs):
                if faults:
                    raise faults.pop()
                return model.forward(inputs)

            return EagleDrafter(EngineModel(forward, model.attention))

        engine = make_engine(drafter=drafter, batch_sizes=[8])
        with pytest.raises(CaptureError, match="no room"):
            engine.capture()
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

    @each_generation
    def test_a_closed_engine_cannot_capture(self, make_engine, generation):
        """No forward runs."""
        calls = []

        def target(model, attention):
            return lambda inputs: calls.append(inputs)

        engine = make_engine(target=target, generation=generation)
        engine.close()
        with pytest.raises(ReplayError, match="the engine is closed"):
            engine.capture()
        assert not calls

    @pytest.mark.parametrize("progress", [None, "log", 5])
    def test_a_progress_that_is_not_callable_is_refused(self, make_engine, progress):
        with pytest.raises(ConfigError, match=r"capture\.progress must be a function") as caught:
            make_engine().capture(progress)
        assert caught.value.field == "progress"


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

    @pytest.mark.parametrize("token", ["a", -1, 96, 7.0, True])
    def test_an_invalid_bos_token_is_refused(self, make_engine, token):
        message = r"SpeculativeEngine\.bos_token_id must be None or a token id from 0 to 95, got"
        with pytest.raises(ConfigError, match=message) as caught:
            make_engine(bos_token_id=token)
        assert caught.value.field == "bos_token_id"

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([], "empty.*bos_token_id"),
            (
                [4, 96],
                r"contains token 96, but the vocabulary has 96 tokens\. Use ids from 0 to 95",
            ),
            ([-1], "contains token -1"),
            ([1.5], "float"),
        ],
    )
    def test_invalid_prompts_are_refused(self, make_engine, prompt, message):
        engine = make_engine()
        with pytest.raises(InputError, match=message) as caught:
            engine.submit(prompt)
        assert caught.value.field == "prompt_ids"
        assert not engine.has_work

    @pytest.mark.parametrize(
        ("option", "values"), [("bos_token_id", ["a", -1, 96, 1.0]), ("seed", ["a", None, 1.5])]
    )
    def test_ids_of_an_engine_are_ints(self, make_engine, option, values):
        for value in values:
            with pytest.raises(ConfigError, match=f"{option} must be .*, got ") as caught:
                make_engine(**{option: value})
            assert caught.value.field == option

    @pytest.mark.parametrize("prompts", [5, None, 1.5])
    def test_prompts_that_are_no_sequence_are_refused(self, make_engine, prompts):
        engine = make_engine()
        with pytest.raises(InputError, match=r"generate got .*expected a sequence") as caught:
            engine.generate(prompts)
        assert caught.value.field == "prompts"

    @pytest.mark.parametrize("sampling", [5, {}, "greedy", SamplingParams, 0], ids=str)
    def test_an_invalid_sampling_is_refused(self, make_engine, sampling):
        engine = make_engine()
        for call in (
            lambda: engine.submit([1], sampling),
            lambda: engine.generate([[1]], sampling),
        ):
            with pytest.raises(InputError, match="sampling must be a graphkit") as caught:
                call()
            assert caught.value.field == "sampling"
        assert not engine.has_work

    def test_a_refused_prompt_queues_none_of_its_call(self, make_engine, task):
        engine = make_engine()
        with pytest.raises(InputError, match="contains token 99"):
            engine.generate([task.prompts[0], [99]])
        assert not engine.has_work, "the caller has no handle of the other request"

    @pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "NGRAM"])
    @chain_and_tree
    def test_chunks_of_any_size_make_no_difference(self, make_engine, task, algorithm, topk):
        prompts = task.prompts[1:4]
        for chunk in (1, 7):  # all other tests prefill a prompt in one chunk
            engine = make_engine(algorithm, topk=topk, chunked_prefill_size=chunk)
            requests = engine.generate(prompts, SamplingParams(max_new_tokens=6))
            assert outputs(requests) == [text[:6] for text in task.expected[1:4]], chunk

    def test_a_chunk_size_of_zero_is_refused(self, make_engine):
        with pytest.raises(ConfigError, match="chunked_prefill_size must be an int >= 1, got 0"):
            make_engine(chunked_prefill_size=0)

    def test_a_closed_engine_takes_no_prompt(self, make_engine):
        engine = make_engine()
        engine.close()
        with pytest.raises(ReplayError, match=r"closed.*Create a new engine"):
            engine.submit([1])
