"""``check_wrapper``: a wrapper that computes what its model does passes, any other is located."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import graphkit as gk
from graphkit.audit import audit_target
from graphkit.engine.attention import SdpaAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.models.wrapper import compare_wrapper
from graphkit.testing import check_wrapper

HIDDEN, HEADS, VOCAB, REQUESTS, CONTEXT, WINDOW, LAYERS = 16, 2, 32, 4, 64, 30, 2
VERIFY, DECODE = gk.ForwardMode.TARGET_VERIFY, gk.ForwardMode.DECODE


class Attention(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index, self.qkv = index, nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden, attend):
        rows = self.qkv(hidden).view(-1, 3, HEADS, HIDDEN // HEADS).unbind(1)
        return hidden + self.out(attend(self.index, *rows).flatten(1))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.positions = nn.Embedding(CONTEXT, HIDDEN)

    def forward(self, ids, positions):
        return self.tokens(ids) + self.positions(positions)


class Router(nn.Module):
    """Chooses between two experts whose scores differ by rounding alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, hidden):
        terms = (hidden * self.weight).unbind(-1)
        scores = torch.stack([sum(terms), sum(reversed(terms))], -1)
        values, chosen = scores.topk(1)
        return scores, values, chosen


class Experts(nn.Module):
    """An attention layer with two experts behind it."""

    def __init__(self, index):
        super().__init__()
        self.attention, self.router = Attention(index), Router()
        self.experts = nn.Parameter(torch.randn(2, HIDDEN))

    def forward(self, hidden, attend):
        hidden = self.attention(hidden, attend)
        _, _, chosen = self.router(hidden)
        return hidden + self.experts[chosen[:, 0]]


class Model(nn.Module):
    """A causal model whose last layer has a window."""

    def __init__(self, layer):
        super().__init__()
        self.config = SimpleNamespace(sliding_window=WINDOW)
        self.embed, self.head = Embedding(), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleList(map(layer, range(LAYERS)))

    def rows(self, ids, positions, attend):
        hidden = self.embed(ids, positions)
        for layer in self.layers:
            hidden = layer(hidden, attend)
        return self.head(hidden)

    def forward(self, ids):
        place = torch.arange(ids.shape[1])
        behind = place[:, None] - place

        def attend(layer, query, key, value):
            seen = (behind >= 0) & (behind < window_of(layer, CONTEXT))
            scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, value)

        return self.rows(ids[0], place, attend)[None]


def window_of(layer, default):
    return WINDOW if layer == LAYERS - 1 else default


class Wrapper(nn.Module):
    """Runs the layers of a model over graphkit's pools; a subclass has a bug."""

    def __init__(self, model, backend):
        super().__init__()
        self.model, self.backend = model, backend

    def forward(self, inputs):
        attend = lambda layer, *rows: self.attend(layer, rows, inputs)  # noqa: E731
        logits = self.model.rows(inputs.input_ids, self.positions(inputs), attend)
        return gk.ForwardOutput(next_token_logits=logits)

    def positions(self, inputs):
        return inputs.positions

    def window(self, layer):
        return window_of(layer, 0)

    def attend(self, layer, rows, inputs):
        return self.backend.attend(
            layer, *rows, inputs.out_cache_loc, inputs.attention, window=self.window(layer)
        )


class NoWindow(Wrapper):
    def window(self, layer):
        return 0


class OwnPositions(Wrapper):
    def positions(self, inputs):
        return torch.arange(inputs.num_tokens)


class NoMask(Wrapper):
    def attend(self, layer, rows, inputs):
        chain = replace(inputs, attention=replace(inputs.attention, mask=None))
        return super().attend(layer, rows, chain)


class FirstRequestOnly(Wrapper):
    """Reads the cache of the first request for all requests."""

    def attend(self, layer, rows, inputs):
        table = inputs.attention.page_table
        table.copy_(table[:1].expand_as(table).clone())
        return super().attend(layer, rows, inputs)


class Unstored(Wrapper):
    def attend(self, layer, rows, inputs):
        other = replace(inputs, out_cache_loc=torch.zeros_like(inputs.out_cache_loc))
        return super().attend(layer, rows, other)


class WrongHead(Wrapper):
    def forward(self, inputs):
        output = super().forward(inputs)
        output.next_token_logits = output.next_token_logits * 1.01
        return output


def make_target(kind=Wrapper, topk=1, width=4, modes=(VERIFY,), layer=Attention, **changes):
    torch.manual_seed(0)
    model = Model(layer).requires_grad_(False)
    requests = ReqToTokenPool(REQUESTS, CONTEXT, "cpu")
    slots = 1 + torch.arange(REQUESTS * CONTEXT).view(REQUESTS, CONTEXT)
    requests.req_to_token[1:] = slots
    pool = MHATokenToKVPool(
        REQUESTS * CONTEXT, 1, torch.float32, HEADS, HIDDEN // HEADS, LAYERS, "cpu"
    )
    backend = SdpaAttention(requests, pool)

    def sample_batch(mode, batch_size, seed):
        tokens = 1 if mode is DECODE else width
        ids = np.random.default_rng(seed).integers(0, VOCAB, batch_size * tokens)
        mask = np.tril(np.ones((batch_size, tokens, tokens), np.bool_))
        return gk.TargetVerifyInputs(
            req_pool_indices=np.arange(batch_size, 0, -1),
            seq_lens=np.full(batch_size, 8, np.int32),
            input_ids=ids,
            positions=np.tile(8 + np.arange(tokens), batch_size),
            out_cache_loc=slots.numpy()[::-1][-batch_size:, 8 : 8 + tokens].ravel(),
            custom_mask=mask if topk > 1 and mode is VERIFY else None,
        )

    facts = {
        "name": "small",
        "spec": gk.SpecConfig("EAGLE", num_steps=3, topk=topk, num_draft_tokens=width),
        "sizes": gk.BufferSizes(REQUESTS, CONTEXT, HIDDEN, VOCAB, torch.float32),
        "forwards": dict.fromkeys(modes, kind(model, backend)),
        "sample_batch": sample_batch,
        "weights": model,
        "mutable_state": pool.tensors(),
        "attention": backend,
        "batch_sizes": [2],
        "model": model,
    }
    return gk.CaptureTarget(**facts | changes)


def compared(target, model=None, **options):
    return compare_wrapper(target, model or target.model, device="cpu", **options)


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("modes", [(VERIFY,), (DECODE,), (VERIFY, DECODE)])
def test_a_right_wrapper_agrees_in_every_row(topk, modes):
    target = make_target(topk=topk, modes=modes)
    record = compared(target)
    width = 4 if VERIFY in modes else 1
    length = CONTEXT - width
    steps = 3 * width + 2 * (len(modes) - 1)
    assert (record.rows, record.prompt_length) == (length + length // 3 + steps, length)
    assert record.difference is None
    assert 0 < record.largest_difference < 1e-5
    check_wrapper(target, device="cpu")


FAILURES = [
    (NoWindow, "the prompt of request 0", WINDOW, "layers.1", "sliding_window of the model is 30"),
    (OwnPositions, "the drafts of request 0", 60, "OwnPositions", "passes positions on"),
    (NoMask, "the drafts of request 0", 61, "layers.0", "custom_mask"),
    (FirstRequestOnly, "the drafts of request 1 beside request 0", 60, "layers.0", "req_pool_ind"),
    (Unstored, "the prompt of request 0", 0, "layers.0", "mask, positions, scaling"),
    (WrongHead, "the prompt of request 0", 0, "", "mask, positions, scaling"),
]


@pytest.mark.parametrize(
    ("kind", "batch", "position", "module", "advice"), FAILURES, ids=lambda each: str(each)[:24]
)
def test_a_wrong_wrapper_is_located(kind, batch, position, module, advice):
    found = compared(make_target(kind, topk=2)).difference
    assert (found.batch, found.position, found.module) == (batch, position, module)
    assert advice in found.advice
    assert found.mode == "TARGET_VERIFY"
    assert found.source.startswith("kit/test_check_wrapper.py:") == bool(module)
    assert found.difference > 1e-3


@pytest.mark.parametrize("declared", [True, False])
def test_experts_that_rounding_chooses_are_those_of_the_model(declared):
    target = make_target(topk=2, layer=Experts)
    model = target.model if declared else lambda ids: target.model(ids)
    assert compared(target, model).difference is None


def test_a_wrong_wrapper_of_a_model_with_experts_is_located():
    found = compared(make_target(NoMask, topk=2, layer=Experts)).difference
    assert (found.batch, found.module) == ("the drafts of request 0", "layers.0.attention")


def test_the_text_names_row_module_and_tokens():
    with pytest.raises(AssertionError) as failure:
        check_wrapper(make_target(NoWindow), device="cpu")
    text = str(failure.value)
    assert text.startswith(
        "TARGET_VERIFY: row 30 of the prompt of request 0 (position 30 of request 0) has logits "
        "that differ from those of the model by up to "
    )
    assert "ulp of float32" in text
    assert "The first difference is argument 0 of `layers.1.out`, computed in `layers.1`." in text
    assert "called at kit/test_check_wrapper.py:" in text
    assert " in forward\n" in text
    assert text.endswith(
        "All rows up to position 29 agree, and sliding_window of the model is 30: check that the "
        "wrapper passes it to the attention of each layer that has it."
    )


@pytest.mark.parametrize(
    "declared",
    [lambda model: model, lambda _: None, lambda model: nn.ModuleDict({"target": model})],
)
def test_the_module_of_a_difference_in_its_own_output_is_named(declared):
    """The model is another object; the wrapper holds it as ``model``, its weights elsewhere."""
    target = make_target()
    model = Model(Attention).requires_grad_(False)
    model.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        model.layers[1].qkv.bias += 1
    found = compared(replace(target, weights=declared(target.model)), model).difference
    assert (found.module, found.position) == ("layers.1.qkv", 0)
    assert found.first == "The first difference is the output of `layers.1.qkv`."


def test_modules_are_found_without_a_declaration():
    target = make_target(NoWindow)
    model, wrapper = target.model, target.forwards[VERIFY]
    bare = replace(target, weights=None, forwards={VERIFY: lambda inputs: wrapper(inputs)})
    found = compared(bare, lambda ids: model(ids), prompt_length=40).difference  # has no config
    assert (found.module, found.position) == ("layers.1", WINDOW)


def test_a_difference_outside_of_all_modules_names_none():
    target = make_target()
    found = compared(target, lambda ids: target.model(ids) + 1).difference
    assert (found.module, found.source) == ("", "")
    assert found.first == "No module that both call differs."


def test_only_decode_may_be_wrong():
    target = make_target(modes=(VERIFY, DECODE))
    wrong = make_target(OwnPositions).forwards[VERIFY]
    wrong.model, wrong.backend = target.model, target.attention
    found = compared(replace(target, forwards={VERIFY: target.forwards[VERIFY], DECODE: wrong}))
    assert found.difference.mode == "DECODE"
    assert found.difference.batch == "the next token of request 0 beside request 1"


def test_a_short_context_does_not_reach_the_window_and_says_so():
    target = make_target(NoWindow)
    record = compared(target, prompt_length=20)
    assert record.difference is None
    assert record.not_reached == (f"sliding_window {WINDOW}",)
    assert compared(target).not_reached == ()


def test_a_prompt_exceeds_the_window_of_the_config(monkeypatch):
    monkeypatch.setitem(globals(), "CONTEXT", 128)
    monkeypatch.setitem(globals(), "WINDOW", 80)
    record = compared(make_target(NoWindow))
    assert record.prompt_length > 80
    assert record.difference.position == 80


def test_long_prompts_run_in_chunks(monkeypatch):
    monkeypatch.setattr("graphkit.models.wrapper.model_logits.MOST_ROWS", 8)
    assert compared(make_target()).rows == 60 + 20 + 3 * 4
    found = compared(make_target(NoWindow)).difference
    assert (found.row, found.position) == (WINDOW % 8, WINDOW)
    assert found.module == "layers.1"


def test_one_request_at_a_time_is_compared_alone():
    target = make_target()
    sizes = replace(target.sizes, max_batch_size=1)
    assert compared(replace(target, sizes=sizes, batch_sizes=None)).rows == 60 + 4


def test_state_and_random_numbers_are_restored():
    target = make_target()
    pools = {name: each.normal_().clone() for name, each in target.mutable_state.items()}
    seed = torch.get_rng_state()
    check_wrapper(target, device="cpu")
    assert all(torch.equal(pools[name], each) for name, each in target.mutable_state.items())
    assert torch.equal(seed, torch.get_rng_state())


def test_own_attention_passes_its_slots():
    target = make_target()
    table = target.attention.req_to_token_pool.req_to_token.clone()
    wrapper = target.forwards[VERIFY]

    def forward(inputs):
        metadata = target.attention.metadata(VERIFY, inputs)
        return wrapper(replace(inputs, attention=metadata))

    bare = replace(target, attention=None, forwards={VERIFY: forward})
    with pytest.raises(gk.TargetError, match=r"KV slots of its requests are unknown.*kv_slots="):
        check_wrapper(bare, device="cpu")
    check_wrapper(replace(bare, kv_slots=table), device="cpu")
    with pytest.raises(gk.TargetError, match="uses row 2"):
        check_wrapper(replace(bare, kv_slots=table[:2]), device="cpu")


def test_slots_must_exist_and_differ():
    target = make_target()
    table = target.attention.req_to_token_pool.req_to_token
    table[2, 4:] = 0
    with pytest.raises(gk.TargetError, match="have KV slots for 4 tokens"):
        check_wrapper(target, device="cpu")
    table[2, :40] = table[1, :40]
    with pytest.raises(gk.TargetError, match="belongs to several positions"):
        check_wrapper(target, device="cpu")


def fails(_ids):
    raise LookupError("no weights today")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda ids: ids, r"returned logits \[1, 64\] for token ids \[1, 64\]"),
        (lambda _ids: None, "returned NoneType"),
        (fails, "LookupError: no weights today"),
        ("llama", "has nothing to be compared with"),
        (
            lambda ids: ids.float().mean() + torch.zeros(1, ids.shape[1], VOCAB),
            r"change by .* when tokens follow the prompt",
        ),
    ],
)
def test_an_unusable_model_is_refused(model, text):
    with pytest.raises(gk.TargetError, match=text):
        check_wrapper(make_target(), model, device="cpu")


def test_unusable_targets_are_refused():
    target = make_target()

    def only_its_width(inputs):
        assert inputs.tokens_per_request == 4, "a width of 4"
        return target.forwards[VERIFY](inputs)

    with pytest.raises(
        gk.TargetError, match=r"failed for the prompt of request 0, 60 rows: .*Asser"
    ):
        check_wrapper(replace(target, forwards={VERIFY: only_its_width}), device="cpu")
    with pytest.raises(gk.TargetError, match="model is None"):
        check_wrapper(replace(target, model=None), device="cpu")
    with pytest.raises(gk.TargetError, match=r"no values for the field 'input_embeds'"):
        check_wrapper(replace(target, optional_fields=["input_embeds"]), device="cpu")
    spec = replace(target.spec, linear_attention=True)
    with pytest.raises(gk.TargetError, match="recurrent layers"):
        check_wrapper(replace(target, spec=spec), device="cpu")
    with pytest.raises(gk.ConfigError, match="prompt_length must be from 1 to 60"):
        check_wrapper(target, prompt_length=61, device="cpu")


@pytest.mark.parametrize("value", [{"model": 3}, {"kv_slots": [1, 2]}])
def test_a_target_refuses_other_types(value):
    with pytest.raises(gk.TargetError, match=next(iter(value))):
        make_target(**value)


def test_the_audit_reports_the_difference_first():
    report = audit_target(make_target(NoWindow), device="cpu", only=["pads", "shadow", "wrapper"])
    first = report.findings[0]
    assert (first.audit, first.severity, first.kind, first.module) == (
        "wrapper", "error", "wrapper differs from model", "layers.1",
    )  # fmt: skip
    assert first.source.endswith(" in forward")
    assert (first.row, first.request) == (WINDOW, 0)
    assert len(report.findings) == 1  # replays of the wrapper equal the wrapper


def test_the_audit_says_what_it_compared():
    def texts(target):
        return [each.text for each in audit_target(target, device="cpu", only=["wrapper"]).checks]

    assert texts(make_target()) == ["92 rows compared with the model"]
    assert texts(make_target(model=None)) == [
        "not checked: the target declares no model to compare it with"
    ]


def test_a_capture_compares_the_model_and_fails():
    right = gk.capture_target(make_target(), device="cpu")
    assert (right.wrapper.rows, right.differs_from_model) == (92, False)
    wrong = gk.capture_target(make_target(NoWindow), device="cpu")
    assert not wrong.mismatches
    assert wrong.differs_from_model
    assert type(wrong).from_json(wrong.to_json()) == wrong
    assert gk.capture_target(make_target(model=None), device="cpu").wrapper is None
