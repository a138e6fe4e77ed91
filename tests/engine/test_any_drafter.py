"""Output with wrong roots, positions and tokens of a drafter, and refusal of invalid drafters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_runs import chain_and_tree, outputs, refuses
from graphkit.engine import EagleDrafter, NgramDrafter, SamplingParams
from graphkit.errors import ConfigError, InputError
from graphkit.spec import CustomSpecAlgorithm, SpecAlgorithm

REQUESTS, NEW = 4, 7
each_generation = pytest.mark.parametrize("generation", ["v1", "v2"])
captured_or_not = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


def altered(kind, alter):
    """Return a subclass of a drafter whose trees are ``alter(tree)``."""

    class Altered(kind):
        def draft(self, req_pool_indices, seq_lens, bonus_tokens):
            return alter(super().draft(req_pool_indices, seq_lens, bonus_tokens))

    return Altered


def with_tokens(tree, change):
    """Return the tree with ``change`` applied to a copy of its tokens, [B, W]."""
    tokens = tree.draft_tokens.view_as(tree.retrieve_next_token).clone()
    change(tokens)
    return replace(tree, draft_tokens=tokens.flatten())


def wrong_root(tree):
    return with_tokens(tree, lambda tokens: tokens[:, 0].copy_((tokens[:, 0] + 1) % 96))


def random_tokens(tree):
    return with_tokens(tree, lambda tokens: tokens[:, 1:].random_(96))


def wrong_everything(tree):
    return random_tokens(wrong_root(tree))


def check_lossless(engine, task, captured):
    if captured:
        engine.capture()
    requests = engine.generate(task.prompts[:REQUESTS], SamplingParams(max_new_tokens=NEW))
    assert outputs(requests) == [text[:NEW] for text in task.expected[:REQUESTS]]
    return engine.stats


class TestLossless:
    @pytest.mark.slow
    @pytest.mark.parametrize("alter", [wrong_root, random_tokens, wrong_everything])
    @pytest.mark.parametrize("kind", [EagleDrafter, NgramDrafter])
    @chain_and_tree
    @each_generation
    def test_a_wrong_tree_does_not_change_the_output(
        self, make_engine, task, generation, topk, kind, alter
    ):
        drafter = altered(kind, alter)
        engine = make_engine(
            "EAGLE",
            topk=topk,
            generation=generation,
            batch_sizes=[8],
            drafter=drafter if kind is EagleDrafter else lambda _: drafter(),
        )
        check_lossless(engine, task, captured=alter is wrong_everything)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [EagleDrafter, NgramDrafter])
    @chain_and_tree
    def test_a_wrong_tree_in_a_loop_does_not_change_the_output(self, make_engine, task, topk, kind):
        drafter = altered(kind, wrong_everything)
        engine = make_engine(
            topk=topk,
            generation="v3",
            batch_sizes=[8],
            drafter=drafter if kind is EagleDrafter else lambda _: drafter(),
        )
        assert check_lossless(engine, task, captured=True).fallbacks == {}

    @pytest.mark.slow
    @chain_and_tree
    @each_generation
    def test_a_wrong_root_costs_no_accepted_draft(self, make_engine, task, generation, topk):
        """The engine replaces the root; it does not discard the tree."""
        lengths = []
        for alter in (lambda tree: tree, wrong_root):
            engine = make_engine(
                topk=topk, generation=generation, drafter=altered(EagleDrafter, alter)
            )
            lengths.append(check_lossless(engine, task, captured=False).accept_length)
        assert lengths[0] == lengths[1] > 1

    def test_a_drafter_keeps_its_own_tensors(self, make_engine, task):
        """The engine copies the tokens: a drafter may return the same tensor in every step."""
        kept = []

        def keep(tree):
            kept.append((wrong_root(tree), wrong_root(tree).draft_tokens))
            return kept[-1][0]

        check_lossless(make_engine(drafter=altered(EagleDrafter, keep)), task, captured=False)
        assert kept
        assert all(torch.equal(tree.draft_tokens, tokens) for tree, tokens in kept)


class TestNarrowTrees:
    """Trees of fewer nodes than draft steps: W < S + 1."""

    @pytest.mark.slow
    @pytest.mark.parametrize("width", [1, 2, 3])
    @pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM"])
    @pytest.mark.parametrize(
        ("generation", "captured"), [("v1", False), ("v2", True), ("v3", True)]
    )
    def test_output_is_that_of_plain_decoding(
        self, make_engine, task, generation, captured, algorithm, width
    ):
        engine = make_engine(
            algorithm,
            topk=2,
            num_steps=4,
            num_draft_tokens=width,
            generation=generation,
            batch_sizes=[8],
        )
        stats = check_lossless(engine, task, captured)
        assert 1 <= stats.accept_length <= width

    @each_generation
    def test_a_whole_path_is_accepted(self, make_engine, task, generation):
        """The best candidates of a draft model without errors form one path of W nodes."""
        engine = make_engine(
            "EXACT", topk=2, num_steps=4, num_draft_tokens=2, generation=generation
        )
        assert check_lossless(engine, task, captured=False).accept_length > 1.5


class TestInvalidTrees:
    CASES = (
        (lambda tree: None, "returned None, expected a DraftTree", "draft"),
        (lambda tree: {"draft_tokens": 1}, "returned dict, expected a DraftTree", "draft"),
        (lambda tree: tree.draft_tokens, "returned Tensor, expected a DraftTree", "draft"),
        (
            lambda tree: replace(tree, draft_tokens=tree.draft_tokens.float()),
            r"draft_tokens is \[\d+\] float32 on \S+, expected \[B \* W\] = \[\d+\] int64",
            "draft_tokens",
        ),
        (
            lambda tree: replace(tree, draft_tokens=tree.draft_tokens.tolist()),
            "draft_tokens is list, expected a tensor",
            "draft_tokens",
        ),
        (
            lambda tree: replace(tree, draft_tokens=tree.draft_tokens[:-1]),
            r"draft_tokens is \[\d+\] int64",
            "draft_tokens",
        ),
        (
            lambda tree: replace(tree, retrieve_next_token=tree.retrieve_next_token.int()),
            r"retrieve_next_token is \[2, \d+\] int32 on \S+, expected \[B, W\]",
            "retrieve_next_token",
        ),
        (
            lambda tree: replace(tree, retrieve_next_token=tree.retrieve_next_token.flatten()),
            r"retrieve_next_token is \[\d+\] int64",
            "retrieve_next_token",
        ),
        (
            lambda tree: replace(tree, retrieve_next_sibling=None),
            "retrieve_next_sibling is NoneType, expected a tensor",
            "retrieve_next_sibling",
        ),
        (
            lambda tree: replace(tree, draft_tokens=tree.draft_tokens.to("meta")),
            "draft_tokens is .* on meta, expected .* on ",
            "draft_tokens",
        ),
    )

    @pytest.mark.parametrize(("alter", "message", "field"), CASES)
    @each_generation
    def test_they_are_refused(self, make_engine, task, generation, alter, message, field):
        engine = make_engine(drafter=altered(EagleDrafter, alter), generation=generation)
        with refuses(InputError, field, rf"Altered\.draft.*{message}"):
            engine.generate(task.prompts[:2], SamplingParams(max_new_tokens=6))

    @pytest.mark.parametrize(
        "mask", [lambda mask: mask.int(), lambda mask: mask[:, 0], lambda mask: None]
    )
    def test_a_tree_needs_a_mask_and_a_chain_none(self, make_engine, task, mask):
        drafter = altered(EagleDrafter, lambda tree: replace(tree, tree_mask=mask(tree.tree_mask)))
        check_lossless(make_engine(drafter=drafter), task, captured=False)
        with refuses(InputError, "tree_mask", r"Altered\.draft: tree_mask is .*expected"):
            check_lossless(make_engine(topk=2, drafter=drafter), task, captured=False)

    @pytest.mark.slow
    @pytest.mark.parametrize("token", [-1, 96, 2**40])
    @captured_or_not
    @chain_and_tree
    def test_a_draft_outside_the_vocabulary(self, make_engine, task, device, topk, captured, token):
        """Refused on the CPU, where the host sees it; never accepted on a device."""

        def alter(tree):
            return with_tokens(tree, lambda tokens: tokens[:, -1].fill_(token))

        engine = make_engine(
            topk=topk,
            drafter=altered(EagleDrafter, alter),
            batch_sizes=[8],
            generation="v2",
        )
        if device == "cuda":
            check_lossless(engine, task, captured)
            return
        message = rf"Altered\.draft: draft_tokens contains {token}, expected token ids from 0 to 95"
        with refuses(InputError, "draft_tokens", message):
            check_lossless(engine, task, captured)


class TestInvalidDrafters:
    @pytest.mark.parametrize(
        ("name", "override"),
        [
            ("draft", lambda self, req_pool_indices: None),
            ("draft", lambda self, rows, seq_lens, bonus_tokens, temperature: None),
            ("prefill_batch", lambda self: None),
            ("extend", lambda self, verified, more: None),
            ("extend_accepted", lambda self, verified: None),
            ("prepare", lambda self: None),
            ("draft", None),
        ],
    )
    def test_an_override_with_other_parameters_is_refused(self, make_engine, name, override):
        kind = type("Mine", (EagleDrafter,), {name: override})
        with refuses(ConfigError, "drafter", rf"Mine\.{name}.*Drafter\.{name}"):
            make_engine(drafter=kind)

    def test_an_override_may_rename_and_add_optional_parameters(self, make_engine, task):
        class Mine(EagleDrafter):
            def draft(self, rows, lengths, bonus, verbose=False):
                return super().draft(rows, lengths, bonus)

            def extend(self, *args):
                return super().extend(*args)

        check_lossless(make_engine(drafter=Mine), task, captured=False)

    @pytest.mark.parametrize("drafter", [EagleDrafter, 5, "EAGLE"], ids=str)
    def test_a_drafter_is_an_instance_of_drafter(self, make_engine, drafter):
        with pytest.raises(ConfigError, match=r"drafter is .*expected an instance of Drafter"):
            make_engine(drafter=lambda _: drafter)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("max_path", None), ("max_path", 0), ("max_path", 2.0), ("slots_needed", -1)],
    )
    def test_its_numbers_are_ints(self, make_engine, name, value):
        kind = type("Mine", (EagleDrafter,), {name: value})
        with refuses(ConfigError, name, rf"Mine\.{name} must be an int"):
            make_engine(drafter=kind)

    @pytest.mark.parametrize("runners", [None, (None,), ["EAGLE"], 3])
    def test_its_runners_are_runners(self, make_engine, runners):
        class Mine(EagleDrafter):
            def prepare(self, context):
                super().prepare(context)
                self.runners = runners

        with pytest.raises(ConfigError, match=r"Mine\.runners is .*expected a tuple of runners"):
            make_engine(drafter=Mine)


class Algorithm(CustomSpecAlgorithm):
    """Creates no future map."""

    def __init__(self, result):
        super().__init__("MINE")
        self.result = result

    def create_future_map(self, *args):
        return self.result


@pytest.mark.parametrize("result", [None, {}, SpecAlgorithm.EAGLE], ids=str)
def test_a_future_map_of_another_type_is_refused(make_engine, result):
    message = rf"create_future_map\(\) returned {type(result).__name__}, expected a FutureMap"
    with pytest.raises(ConfigError, match=message):
        make_engine(Algorithm(result), drafter=lambda _: NgramDrafter())


def test_a_stashed_result_is_a_tensor(make_engine, task):
    class Mine(NgramDrafter):
        def prepare(self, context):
            super().prepare(context)
            self.future_map = context.future_map

        def prefill_batch(self, batch):
            self.future_map.stash(batch.req_pool_indices, {"lengths": [3]})

    engine = make_engine("EAGLE", drafter=lambda _: Mine())
    with pytest.raises(InputError, match="FutureMap result 'lengths' is list, expected a tensor"):
        engine.generate(task.prompts[:1])
