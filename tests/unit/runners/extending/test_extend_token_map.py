"""The catch-up over a reduced vocabulary returns candidates in the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphkit import ForwardOutput
from graphkit.buffers import MultiLayerDraftExtendInputs
from graphkit.runners import DraftExtendRunner, DraftExtendV2Runner, MultiLayerEagleRunner

TOKEN_MAP = torch.tensor([30, 2, 3, 17, 8, 0, 11])


def reduced(model):
    """Return a forward with the logits of the mapped tokens alone."""

    def forward(inputs):
        output = model(inputs)
        return ForwardOutput(
            next_token_logits=output.next_token_logits[:, TOKEN_MAP],
            hidden_states=output.hidden_states,
        )

    return forward


@pytest.fixture
def case(extend_case):
    """Chains of 3 steps with 2 candidates each, over 7 tokens."""
    case = extend_case("EAGLE", 3, 2, 4)
    case.sizes = replace(case.sizes, draft_vocab_size=7)
    return case


def test_candidates_are_target_tokens(case, make_model):
    batch = case.batch([2, 4, 1])
    runner = case.runner(DraftExtendRunner, reduced(make_model()), draft_token_map=TOKEN_MAP)
    for output in (runner.replay(batch, clone=True), runner.fall_back(batch)):
        assert output.next_token_logits.shape == (3, 7)
        probs, columns = output.next_token_logits.softmax(-1).topk(2)
        assert torch.equal(output.topk_index, TOKEN_MAP[columns])
        torch.testing.assert_close(output.topk_p, probs)


def test_logits_of_v2_stay_those_of_the_draft_vocabulary(case, make_model):
    runner = case.runner(DraftExtendV2Runner, reduced(make_model()), draft_token_map=TOKEN_MAP)
    assert runner.replay(case.batch([2, 4, 1], width=4)).next_token_logits.shape == (12, 7)
    assert runner.draft_token_map is TOKEN_MAP


def test_layers_read_target_tokens(case, make_model):
    """Each layer inserts the best token of the one before into its window."""
    batch = case.batch([2, 4, 1], width=4, cls=MultiLayerDraftExtendInputs)
    models = [make_model(layer) for layer in range(3)]
    chain = [reduced(model) for model in models]
    runner = case.runner(MultiLayerEagleRunner, chain, draft_token_map=TOKEN_MAP, capture=False)
    output = runner.fall_back(batch)
    columns = output.next_token_logits.topk(2).indices
    assert torch.equal(output.topk_index, TOKEN_MAP[columns])
    for layer, model in enumerate(models[1:]):
        (window,) = model.seen
        best = output.topk_index[:, layer, 0]
        assert torch.equal(window.input_ids[window.select_index], best)
