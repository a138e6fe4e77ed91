"""Lossless decoding of targets with recurrent state, for paths that end at any node."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from graphkit.attention import SdpaAttention
from graphkit.config import BufferSizes
from graphkit.engine import Drafter, DraftTree, EngineModel, SamplingParams, SpeculativeEngine
from graphkit.errors import ConfigError
from graphkit.kv import MHATokenToKVPool, RecurrentStatePool, ReqToTokenPool
from graphkit.runners import ForwardOutput
from graphkit.spec import SpecConfig

VOCAB, HIDDEN, REQUESTS, CONTEXT, STEPS, NEW = 128, 16, 4, 80, 3, 17


class DecayingForward:
    """A target with one decaying sum per request: state = 0.7 * state + embedding."""

    def __init__(self, device: str, width: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator).to(device)
        self.head = torch.randn(HIDDEN, VOCAB, generator=generator).to(device)
        self.states = RecurrentStatePool(REQUESTS, width, 1, device, shapes={"sum": (HIDDEN,)})

    def __call__(self, inputs):
        def update(states, row):
            total = 0.7 * states["sum"] + row
            return {"sum": total}, total

        rows = self.embedding[inputs.input_ids]
        sums = self.states.scan(0, self.states.slots(inputs), update, rows)
        return ForwardOutput(next_token_logits=sums @ self.head)

    def plain(self, prompt: Sequence[int], count: int) -> list[int]:
        ids, total = list(prompt), torch.zeros(HIDDEN, device=self.head.device)
        for place in range(len(prompt) + count - 1):
            total = 0.7 * total + self.embedding[ids[place]]
            if place >= len(prompt) - 1:
                ids.append(int((total @ self.head).argmax()))
        return ids[len(prompt) :]


def mamba_forward(device: str, width: int):
    example = importlib.import_module("tools.examples.mamba")
    forward = example.MambaForward(example.small_mamba().to(device), width)

    def plain(prompt, count):
        ids = list(prompt)
        for _ in range(count):
            logits = forward.model(torch.tensor([ids], device=device), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]

    forward.plain = plain
    return forward


class ErringOracle(Drafter):
    """Drafts the expected text with errors, in a chain or with two candidates per depth.

    In a tree the expected token is now the first and now the second candidate of its depth, or
    neither, so that accepted paths end at every node.
    """

    def __init__(self, texts: list[list[int]], topk: int) -> None:
        self._texts, self._topk = {}, topk
        for text in texts:
            self._texts[tuple(text[: len(text) - NEW])] = text

    @property
    def max_path(self):
        return STEPS + 1

    def prepare(self, context):
        self._width, device = context.verify_width, context.device
        self._table = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int64, device=device)
        self._prompts: dict[int, list[int]] = {}
        self._depths = torch.arange(1, STEPS + 1, device=device)
        # Node 1 + topk * d continues the path; in a tree its sibling is a leaf.
        children, siblings = [1, *([-1] * (self._width - 1))], [-1] * self._width
        mask = torch.eye(self._width, dtype=torch.bool)
        for node in range(1, self._width, self._topk):
            if node + self._topk < self._width:
                children[node] = node + self._topk
            parent = max(node - self._topk, 0)
            mask[node : node + self._topk] |= mask[parent]
            if self._topk > 1:
                siblings[node] = node + 1
        self._links = torch.tensor([children, siblings], device=device)
        self._mask = mask.to(device)
        self.wrong_paths = torch.zeros((), dtype=torch.int64, device=device)

    def prefill(self, chunk):
        row = int(chunk.req_pool_indices)
        known = self._prompts.setdefault(row, []) if chunk.start else []
        self._prompts[row] = known + chunk.input_ids.tolist()
        if chunk.is_last and row:  # row 0 belongs to pads
            text = self._texts[tuple(self._prompts[row])]
            self._table[row, : len(text)] = torch.tensor(text)

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        requests = len(seq_lens)
        place = (seq_lens[:, None] + self._depths).clamp(max=CONTEXT - 1)
        expected = self._table[req_pool_indices].gather(1, place)
        wrong = (expected + 1) % VOCAB
        kind = (3 * place + 5 * req_pool_indices[:, None]) % 7
        drafts = torch.where(kind < 4, expected, wrong)
        if self._topk > 1:
            second = torch.where(kind < 4, wrong, torch.where(kind < 6, expected, wrong - 1))
            drafts = torch.stack([drafts, second % VOCAB], 2).flatten(1)
        index = torch.arange(requests * self._width, device=seq_lens.device)
        children, siblings = self._links.unbind()
        return DraftTree(
            draft_tokens=torch.cat([bonus_tokens[:, None], drafts], 1).flatten(),
            tree_mask=self._mask.expand(requests, -1, -1).contiguous(),
            retrieve_index=index.view(requests, -1),
            retrieve_next_token=children.expand(requests, -1).contiguous(),
            retrieve_next_sibling=siblings.expand(requests, -1).contiguous(),
        )

    def extend(self, verified):
        """Count the paths whose ``accept_index`` does not start at the root and descend.

        On the device, because v3 captures it.
        """
        requests, longest = verified.accept_index.shape
        root = torch.arange(requests, device=self._table.device)[:, None] * self._width
        steps = torch.arange(longest, device=self._table.device)
        is_accepted = steps < verified.counts.num_accepted_tokens[:, None]
        node = torch.where(is_accepted, verified.accept_index - root, self._width)
        is_right = (verified.accept_index >= 0) == is_accepted
        is_right &= node <= self._width
        is_right[:, 0] &= node[:, 0] == 0
        is_right[:, 1:] &= (node.diff() > 0) | ~is_accepted[:, 1:]
        self.wrong_paths += (~is_right).any(1).sum()

    def extend_accepted(self, verified, num_accepted_tokens):
        self.extend(verified)
        # A selection is the result of a batch of these requests alone.
        picked = torch.tensor([len(num_accepted_tokens) - 1], device=self._table.device)
        self.extend(verified.select(picked))


PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [33, 20, 11, 50], [8, 8], [60, 1, 4]]


@pytest.fixture(scope="module", params=["decaying", "mamba"])
def target(request, device):
    """Return the forwards and texts of one model, created once for all settings."""
    made = {}

    def forward_of(width):
        if width not in made:
            create = DecayingForward if request.param == "decaying" else mamba_forward
            made[width] = create(device, width)
        return made[width]

    if request.param == "mamba":
        pytest.importorskip("transformers")
    plain = forward_of(STEPS + 1).plain
    texts = [[*prompt, *plain(prompt, NEW)] for prompt in PROMPTS]
    return SimpleNamespace(forward_of=forward_of, texts=texts)


def engine_of(target, device, topk, **options):
    width = STEPS + 1 if topk == 1 else 1 + 2 * STEPS
    forward = target.forward_of(width)
    requests = ReqToTokenPool(REQUESTS, CONTEXT, device)
    pool = MHATokenToKVPool(REQUESTS * CONTEXT, 1, torch.float32, 1, 1, 0, device)
    options = {"drafter": ErringOracle(target.texts, topk), **options}
    return SpeculativeEngine(
        EngineModel(forward, SdpaAttention(requests, pool), options.pop("states", forward.states)),
        spec=SpecConfig("NGRAM", STEPS, topk, width, linear_attention=True),
        sizes=BufferSizes(REQUESTS, CONTEXT, HIDDEN, VOCAB, torch.float32),
        device=device,
        **options,
    )


def run(engine):
    """Run all prompts; two join later, in rows that other requests have used."""
    with engine:
        requests = [engine.submit(prompt, SamplingParams(max_new_tokens=NEW)) for prompt in PROMPTS]
        while engine.has_work:
            engine.step()
        return [request.output_ids for request in requests], engine.stats


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_output_is_that_of_plain_decoding(target, device, topk, generation, captured):
    drafter = ErringOracle(target.texts, topk)
    engine = engine_of(
        target, device, topk, drafter=drafter, generation=generation, batch_sizes=[1, 4],
        chunked_prefill_size=6,
    )  # fmt: skip
    if captured:
        engine.capture()
    outputs, stats = run(engine)
    assert outputs == [text[-NEW:] for text in target.texts]
    assert not drafter.wrong_paths
    assert not (captured and stats.fallbacks)
    assert 1.5 < stats.accept_length < STEPS + 1, "some drafts are accepted and some rejected"


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_without_a_commit_the_output_differs(target, device, topk, monkeypatch):
    """The texts are sensitive to the state: the test above cannot pass by accident."""
    monkeypatch.setattr(RecurrentStatePool, "commit", lambda *_: None)
    outputs, _ = run(engine_of(target, device, topk))
    assert outputs != [text[-NEW:] for text in target.texts]


def test_decoding_without_drafts_commits_each_token(target, device):
    forward = target.forward_of(STEPS + 1)
    requests = ReqToTokenPool(REQUESTS, CONTEXT, device)
    pool = MHATokenToKVPool(REQUESTS * CONTEXT, 1, torch.float32, 1, 1, 0, device)
    engine = SpeculativeEngine(
        EngineModel(forward, SdpaAttention(requests, pool), forward.states),
        spec=SpecConfig("NONE", 0, 1, 1),
        sizes=BufferSizes(REQUESTS, CONTEXT, HIDDEN, VOCAB, torch.float32),
        device=device,
    )
    assert run(engine)[0] == [text[-NEW:] for text in target.texts]


class TestPoolsThatDoNotFit:
    def refusal(self, target, device, **sizes):
        made = {"size": REQUESTS, "width": STEPS + 1, **sizes}
        states = RecurrentStatePool(
            made["size"], made["width"], 1, device, shapes={"sum": (HIDDEN,)}
        )
        with pytest.raises(ConfigError) as caught:
            engine_of(target, device, 1, states=states)
        assert caught.value.field == "recurrent_state"
        return str(caught.value)

    def test_too_few_rows(self, target, device):
        text = self.refusal(target, device, size=2)
        assert "has 2 rows of 4 nodes" in text
        assert "needs 4 rows of 4 nodes" in text

    def test_too_few_nodes(self, target, device):
        assert "has 4 rows of 3 nodes" in self.refusal(target, device, width=3)
