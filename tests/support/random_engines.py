"""Random engines under random faults, against plain decoding that is written here.

Each run draws a target (dense, with windows, recurrent), a drafter, a tree in any node order, page
size, generation, batch sizes and the budget of prefills. Some engines have several draft lengths,
chains also with rows that are divided among the requests. Half of the pools are too small for all
requests at once, so that requests are preempted. A third of the runs are in the checking mode. The
requests have random prompts, lengths, penalties, biases, filters, seeds and stop tokens, in a third
of the runs of v1 and v2 also token masks, and join and are aborted at random. A KeyboardInterrupt
is raised at a random line, or the forward raises an error; a request whose matcher is interrupted
in a call fails. Every text is compared with that of the target's own logits, computed without a
cache, masked, processed, filtered and sampled in float64 by code that shares nothing with graphkit,
and so are log-probabilities. In bfloat16, and in float32 beyond these, texts and log-probabilities
are those of an engine that decodes each request alone, bit for bit. With several ranks, all run
every engine as in tensor parallelism, without faults.

    python tests/support/random_engines.py --runs 3000 --out tools/bench/results/random_engines.json
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import random
import runpy
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

import window_models
from decaying_target import DecayingForward
from draft_choices import choices_of, force_variant
from exact_sums import exact_sums
from graphkit.config import BufferSizes
from graphkit.distributed import RankGroup
from graphkit.engine import (
    Drafter,
    DraftTree,
    EagleDrafter,
    EngineModel,
    FinishReason,
    MultiLayerDrafter,
    NgramDrafter,
    SamplingParams,
    SpeculativeEngine,
)
from graphkit.engine.attention import SdpaAttention
from graphkit.engine.kv import MHATokenToKVPool, ReqToTokenPool
from graphkit.errors import ReplayError
from graphkit.graphs import environment
from graphkit.records import BenchReport, Measure
from graphkit.spec import SpecConfig
from graphkit.views import bench_view
from interruptions import raising_after
from small_llama import StandaloneForward, full_logits, hidden_states, small_llama

_IMPERFECT = Path(__file__).parents[1] / "engine" / "imperfect_models.py"
IMPERFECT = SimpleNamespace(**runpy.run_path(str(_IMPERFECT)))
CONTEXT, REQUESTS, PROMPT = 64, 3, 9
CLOSE_LOGITS, CLOSE_SUMS, CLOSE_LOGPROBS = 1e-5, 2e-5, 1e-2
"""Distances below which rounding may decide between two tokens: such a text is cut off there. That
of logits is relative to the largest. The last one is that of log-probabilities."""
HANG_S = 120.0


class FaultError(RuntimeError):
    """The error that faults raise."""


# Plain decoding.


def philox_word(seed: int, position: int) -> int:
    """Return the first word of Philox4x32-10 for a key and a counter (Salmon et al., SC'11)."""
    c, k = [position % 2**32, 0, 0, 0], [seed % 2**32, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b % 2**32, a >> 32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[0]


def chosen_token(logits: np.ndarray, params: SamplingParams, position: int) -> tuple[int, bool]:
    """Return the token after a position, and whether rounding could have decided otherwise."""
    rounding = CLOSE_LOGITS * abs(logits[np.isfinite(logits)]).max()
    if not params.temperature:
        second, first = np.sort(logits)[-2:]
        return int(logits.argmax()), first - second < rounding
    rounding /= params.temperature  # of weights, relative to them
    weights = np.exp((logits - logits.max()) / params.temperature)
    ordered = np.sort(weights)[::-1]
    bounds = [params.min_p]
    if params.top_k > 0:
        bounds.append(ordered[min(params.top_k, len(ordered)) - 1])
    if params.top_p < 1:
        kept = ordered[ordered >= max(bounds[1:], default=0)]
        reached = kept.cumsum() / kept.sum()
        bounds.append(kept[int((reached < params.top_p).sum())])
        is_close = bool((abs(reached - params.top_p) < max(CLOSE_SUMS, rounding)).any())
    else:
        is_close = False
    bound = max(bounds)
    distance = abs(weights - bound)
    is_close |= bool(((distance < rounding * bound) & (distance > 0)).any())
    kept = np.where(weights >= bound, weights, 0)
    sums = kept.cumsum() / kept.sum()
    u = (philox_word(params.seed, position) >> 8) * 2.0**-24
    is_close |= bool((abs(sums - u) < max(CLOSE_SUMS, rounding)).any())
    return int((sums > u).argmax()), is_close


def processed(logits: np.ndarray, prompt, text, params: SamplingParams) -> np.ndarray:
    """Return the logits after a text, in the order of vLLM: biases, least length, penalties."""
    logits, counts = logits.copy(), Counter(text)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(text) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -math.inf
    for token in {*prompt, *text}:
        penalty = params.repetition_penalty
        logits[token] *= 1 / penalty if logits[token] > 0 else penalty
    for token, count in counts.items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


class Turns:
    """A matcher that allows the tokens of one remainder, which each token moves on by one."""

    def __init__(self, vocab_size, count, first):
        self._vocab_size, self._count, self._first, self._accepted = vocab_size, count, first, 0

    def allowed(self, accepted):
        """Return the tokens that may follow so many, as a range."""
        return range((self._first + accepted) % self._count, self._vocab_size, self._count)

    def fill_next_token_bitmask(self, bitmask, index):
        words = [0] * bitmask.shape[1]
        for token in self.allowed(self._accepted):
            words[token // 32] |= 1 << token % 32
        bitmask[index] = torch.tensor(words).int()

    def accept_token(self, token):
        is_allowed = token in self.allowed(self._accepted)
        self._accepted += is_allowed
        return is_allowed

    def rollback(self, count):
        self._accepted -= count

    def is_terminated(self):
        return False


def plain_text(logits_after, prompt, params, limit, turns=None):
    """Return the text of a request, its log-probabilities and how many tokens are certain.

    Rounding may change the others. ``turns`` are the arguments of its matcher, if it has one.
    """
    ids, text, logprobs, certain = list(prompt), [], [], None
    while len(text) < limit:
        logits = logits_after(ids)
        if turns is not None:  # also of log-probabilities
            is_refused = np.ones(len(logits), bool)
            is_refused[[*Turns(*turns).allowed(len(text))]] = False
            logits = np.where(is_refused, -math.inf, logits)
        offered = processed(logits, prompt, text, params)
        token, is_close = chosen_token(offered, params, len(ids) - 1)
        if is_close and certain is None:
            certain = len(text)
        ids.append(token)
        text.append(token)
        largest = logits.max()
        logprobs.append(logits[token] - largest - math.log(np.exp(logits - largest).sum()))
        if token in params.stop_token_ids:
            break
    return text, logprobs, len(text) if certain is None else certain


# Targets.


class MarkedForward(IMPERFECT.LabellingForward):
    """Rows of prompts have slightly different keys than rows of steps, as if by other kernels."""

    def _hidden(self, inputs, first_layer=0):
        def attend(layer, query, key, value):
            is_step = inputs.lengths is None or inputs.packs_nodes
            marked = key if is_step else key * 1.0625
            slots, metadata = inputs.out_cache_loc, inputs.attention
            return self._attention.attend(
                first_layer + layer, query, marked, value, slots, metadata
            )

        return hidden_states(self._model, inputs.input_ids, inputs.positions, attend)


class DenseTarget:
    """A Llama of one layer. In bfloat16, where no formulas apply, rows of prompts are marked."""

    vocab_size, hidden_size = 96, 32
    kinds = "TREE", "NGRAM", "EAGLE", "STANDALONE", "LAYERS", "NONE"

    def __init__(self, dtype=torch.float32) -> None:
        self.model, self.dtype = small_llama(dtype=dtype), dtype

    def logits_after(self, ids):
        return full_logits(self.model, torch.tensor([ids]))[0, -1].double().numpy()

    def attention(self, requests, page_size, slots, layers=1):
        cpu = torch.device("cpu")
        pool = MHATokenToKVPool(slots, page_size, self.dtype, 1, 16, layers, cpu)
        return SdpaAttention(requests, pool)

    def engine_model(self, requests, page_size, width, draw, slots):
        attention = self.attention(requests, page_size, slots)
        is_marked = self.dtype is torch.bfloat16
        kind = MarkedForward if is_marked else IMPERFECT.LabellingForward
        return EngineModel(kind(self.model, attention), attention)

    def drafter(self, kind, requests, page_size, topk, steps):
        if kind == "LAYERS":
            attention = self.attention(requests, page_size, REQUESTS * CONTEXT, steps)
            erring = partial(IMPERFECT.ErringForward, self.model, attention, topk)
            return MultiLayerDrafter(EngineModel([erring(i) for i in range(steps)], attention))
        attention = self.attention(requests, page_size, REQUESTS * CONTEXT)
        if kind == "STANDALONE":
            return EagleDrafter(EngineModel(StandaloneForward(self.model, attention), attention))
        erring = IMPERFECT.ErringForward(self.model, attention, topk)
        return EagleDrafter(EngineModel(erring, attention))


class WindowTarget:
    """Layers with and without a window, in one pool or in two."""

    vocab_size, hidden_size, kinds = window_models.VOCAB, window_models.HIDDEN, ("TREE", "NGRAM")
    dtype = torch.float32

    def __init__(self) -> None:
        self.model = window_models.WindowModel("cpu")

    def logits_after(self, ids):
        rows = torch.arange(len(ids))
        behind = rows[:, None] - rows

        def attend(layer, query, key, value):
            seen = (behind >= 0) & (behind < (window_models.WINDOWS[layer] or CONTEXT))
            scores = torch.einsum("tnd,snd->nts", query, key) * window_models.HEAD_DIM**-0.5
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            return torch.einsum("nts,snd->tnd", weights, value)

        return self.model.logits(torch.tensor(ids), rows, attend)[-1].double().numpy()

    def engine_model(self, requests, page_size, width, draw, slots):
        attention = window_models.window_attention(
            "cpu", page_size=page_size, has_window_pool=draw.random() < 0.7, requests=requests,
            slots=slots,
        )  # fmt: skip
        return window_models.window_target(self.model, attention)


class RecurrentTarget:
    """A decaying sum per request."""

    vocab_size, hidden_size, kinds = 128, 16, ("TREE", "NGRAM")
    dtype = torch.float32

    def logits_after(self, ids):
        forward = _decaying(1)
        total = torch.zeros(self.hidden_size)
        for token in ids:
            total = 0.7 * total + forward.embedding[token]
        return (total @ forward.head).double().numpy()

    def engine_model(self, requests, page_size, width, draw, slots):
        forward = DecayingForward("cpu", width)
        pool = MHATokenToKVPool(slots, page_size, torch.float32, 1, 1, 0, "cpu")
        return EngineModel(forward, SdpaAttention(requests, pool), forward.states)


@cache
def _decaying(width):
    return DecayingForward("cpu", width)


TARGETS = cache(
    lambda: (DenseTarget(), DenseTarget(torch.bfloat16), WindowTarget(), RecurrentTarget())
)


def decoded_alone(target, prompt, params, turns=None):
    """Return text and log-probabilities of a request in an engine of one request, without drafts.

    Its prompt is one chunk.
    """
    slots, requests = CONTEXT, ReqToTokenPool(1, CONTEXT, "cpu")
    model = target.engine_model(requests, 1, 1, random.Random(0), slots)
    spec = SpecConfig("NONE", 0, 1, 1, linear_attention=model.recurrent_state is not None)
    sizes = BufferSizes(1, CONTEXT, target.hidden_size, target.vocab_size, target.dtype)
    with SpeculativeEngine(
        model, spec=spec, sizes=sizes, device="cpu", generation="v1",
        structured_output=turns is not None,
    ) as engine:  # fmt: skip
        matcher = None if turns is None else Turns(*turns)
        request = engine.submit(prompt, replace(params, logprobs=True), matcher=matcher)
        while engine.has_work:
            engine.step()
        return request.output_ids, request.logprobs


class RandomTrees(Drafter):
    """Drafts the expected text with errors, in one random tree whose nodes are in random order."""

    def __init__(self, draw, texts, vocab_size):
        self._draw, self._texts, self._vocab_size = draw, texts, vocab_size

    def prepare(self, context):
        width, draw = context.verify_width, self._draw
        is_chain = context.spec.topk == 1
        parents = [node - 1 if is_chain else draw.randrange(node) for node in range(1, width)]
        order = list(range(1, width)) if is_chain else draw.sample(range(1, width), width - 1)
        place = [0, *order]  # of each node
        child, sibling, depth = [-1] * width, [-1] * width, [0] * width
        mask = torch.eye(width, dtype=torch.bool)
        for node, parent in enumerate(parents, 1):
            here, above = place[node], place[parent]
            mask[here] |= mask[above]
            depth[here] = depth[above] + 1
            sibling[here], child[above] = child[above], here
        self._child, self._sibling = torch.tensor(child), torch.tensor(sibling)
        self._mask, self._depth = mask, torch.tensor(depth)
        self._node = torch.arange(width)
        self._table = torch.zeros_like(context.req_to_token, dtype=torch.int64)
        self._known = {}

    @property
    def max_path(self):
        return int(self._depth.max()) + 1

    def prefill(self, chunk):
        row = int(chunk.req_pool_indices)
        known = [*(self._known.get(row, []) if chunk.start else []), *chunk.input_ids.tolist()]
        self._known[row] = known
        if chunk.is_last and row:
            text = next((t for t in self._texts if t[: len(known)] == known), known)
            self._table[row, : len(text)] = torch.tensor(text)

    def draft(self, req_pool_indices, seq_lens, bonus_tokens):
        requests = len(seq_lens)
        place = (seq_lens[:, None] + self._depth).clamp(max=CONTEXT - 1)
        expected = self._table[req_pool_indices].gather(1, place)
        error = (7 * place + 5 * req_pool_indices[:, None] + 3 * self._node) % 11
        drafts = torch.where(error < 6, expected, (expected + error) % self._vocab_size)
        return DraftTree(
            draft_tokens=drafts.flatten(),
            tree_mask=self._mask.expand(requests, -1, -1).contiguous(),
            retrieve_next_token=self._child.repeat(requests, 1),
            retrieve_next_sibling=self._sibling.repeat(requests, 1),
        )

    def extend(self, verified):
        """Do nothing."""


class Faulty:
    """A forward that raises at a chosen call."""

    def __init__(self, forward):
        self.forward, self.countdown = forward, -1

    def __call__(self, inputs):
        self.countdown -= 1
        if self.countdown == 0:
            raise FaultError("the forward failed")
        return self.forward(inputs)


# Runs.


def random_params(draw, vocab_size, most):
    params = {"max_new_tokens": draw.randint(1, most)}
    if draw.random() < 0.6:
        params |= {"temperature": draw.choice([0.4, 0.9, 1.6]), "seed": draw.randrange(2**63)}
        params |= draw.choice(
            [{}, {"top_k": draw.randint(1, 20)}, {"top_p": draw.uniform(0.3, 0.99)},
             {"min_p": draw.uniform(0.01, 0.5)}, {"top_k": 12, "top_p": 0.9, "min_p": 0.02}]
        )  # fmt: skip
    if draw.random() < 0.2:
        params["stop_token_ids"] = draw.sample(range(vocab_size), 5)
    return SamplingParams(**params | random_processors(str(params), vocab_size, params))


def random_processors(seed, vocab_size, params):
    """Return random processors of logits. Half of the requests have none."""
    draw = random.Random(seed)
    if draw.random() < 0.5:
        return {"logprobs": draw.random() < 0.3}
    found = {"logprobs": draw.random() < 0.5}
    if draw.random() < 0.5:
        found["repetition_penalty"] = draw.choice([0.7, 1.1, 1.3, 3.0])
    for name in ("presence_penalty", "frequency_penalty"):
        if draw.random() < 0.4:
            found[name] = draw.uniform(-2, 2)
    if draw.random() < 0.4:
        some = draw.sample(range(vocab_size), draw.choice([1, 5, vocab_size // 2]))
        found["logit_bias"] = {token: draw.choice([-math.inf, -3.0, 0.5, 4.0]) for token in some}
    if draw.random() < 0.2:  # stop tokens that end most texts
        found["stop_token_ids"] = draw.sample(range(vocab_size), 16)
        found["min_tokens"] = draw.randint(0, params["max_new_tokens"])
    return found


def has_processors(params):
    """Return whether a request has processors that change logits."""
    plain = SamplingParams()
    names = (
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"
    )  # fmt: skip
    return any(getattr(params, name) != getattr(plain, name) for name in names)


def draft_lengths(seed, kind, steps, topk, width):
    """Return draft steps, topk and nodes; of some runs several ascending draft lengths.

    Most chains have their length and 0, as by default, so that steps divide their rows. Other
    numbers of the run do not depend on these draws.
    """
    draw = random.Random(f"lengths {seed}")
    if kind not in ("EAGLE", "STANDALONE", "NGRAM", "LAYERS"):
        return steps, topk, width
    if topk == 1 and width > 2 and draw.random() < 0.7:
        return (0, steps), topk, (1, width)
    if draw.random() < 0.6:
        return steps, topk, width
    lengths, widths = [], [0]
    for count in sorted(draw.sample(range(steps), draw.randint(1, steps))):
        nodes = min(1 + topk + (count - 1) * topk**2 if count else 1, width - 1)
        if nodes > widths[-1]:
            lengths.append(count)
            widths.append(nodes)
    return (*lengths, steps), topk, (*widths[1:], width)


def mix_lengths(engine, draw):
    """Let the next step, or launch, run another draft length than the one before."""
    if engine.spec.is_adaptive:
        force_variant(engine, draw.randrange(choices_of(engine).times.shape[1]))


def one_run(seed: int, counts: Counter[str], group: RankGroup | None = None) -> None:
    """Run a random engine; raises an AssertionError for a wrong text, a leak or a hang."""
    draw = random.Random(seed)
    target = draw.choice(TARGETS())
    kind = draw.choice(target.kinds)
    page_size, generation = draw.choice([1, 1, 4]), draw.choice(["v1", "v2", "v3"])
    steps, topk, width = draw.randint(1, 4), draw.choice([1, 2]), draw.randint(2, 8)
    if kind == "NONE":
        steps, topk, width = 0, 1, 1
    elif kind in ("EAGLE", "STANDALONE", "LAYERS"):
        width = steps + 1 if topk == 1 else draw.randint(2, 1 + topk + (steps - 1) * topk**2)
        if kind == "LAYERS" and topk > 1:
            width = draw.randint(2, 1 + topk * steps)
        if kind == "EAGLE" and draw.random() < 0.2:
            steps, topk, width = 2, 16, draw.randint(2, 20)
    algorithm = {"TREE": "NGRAM", "LAYERS": "EAGLE"}.get(kind, kind)
    requests = ReqToTokenPool(REQUESTS, CONTEXT, "cpu")
    is_small, most = draw.random() < 0.5, 14 if topk == 16 else 30
    ahead = max(width, topk * steps if kind in ("EAGLE", "STANDALONE") else 0)
    ahead += kind == "STANDALONE"  # the draft model catches up one token further
    longest_path = width if kind in ("TREE", "NGRAM") else min(width, steps + 1)
    longest = PROMPT + most + ahead + longest_path
    slots = longest + page_size + draw.randint(0, longest // 2)
    slots = slots if is_small else REQUESTS * CONTEXT
    model = target.engine_model(requests, page_size, width, draw, slots)
    forward = Faulty(model.forward)
    model = EngineModel(forward, model.attention, model.recurrent_state)
    texts: list[list[int]] = []
    if kind == "TREE":
        drafter = RandomTrees(draw, texts, target.vocab_size)
    elif kind in ("NGRAM", "NONE"):
        drafter = NgramDrafter() if kind == "NGRAM" else None
    else:
        drafter = target.drafter(kind, requests, page_size, topk, steps)
    spec = SpecConfig(
        algorithm, *draft_lengths(seed, kind, steps, topk, width), page_size=page_size,
        linear_attention=model.recurrent_state is not None,
    )  # fmt: skip
    if group is not None and spec.is_adaptive and generation == "v3":
        generation = "v2"  # ranks without loops refuse several lengths in v3
    is_checking = random.Random(f"checks {seed}").random() < 1 / 3
    with patch.dict(os.environ, {"GRAPHKIT_CHECK": str(int(is_checking))}):
        has_masks = generation != "v3" and group is None
        has_masks &= random.Random(f"masks {seed}").random() < 1 / 3
        engine = _engine(draw, target, model, drafter, spec, generation, group, has_masks)
    counts[f"{kind}, {generation}"] += 1
    counts["with windows"] += isinstance(target, WindowTarget)
    counts["recurrent"] += isinstance(target, RecurrentTarget)
    counts["bfloat16"] += target.dtype is torch.bfloat16
    with engine:
        if draw.random() < 0.6:
            engine.capture()
            counts["loops that check slots"] += is_checking and generation == "v3"
        _serve(engine, target, forward, texts, draw, counts, most, has_faults=group is None)
        counts["several draft lengths"] += engine.spec.is_adaptive
        for drafts, number in engine.stats.drafted_lengths.items():
            counts["plain steps among drafts"] += number * (engine.spec.is_adaptive and not drafts)
            counts["rows divided among requests"] += number * (
                engine.spec.is_adaptive
                and drafts + 1 not in {spec.num_draft_tokens for spec in engine.spec.lengths}
            )
        if (prompts := engine._spec_step.prompts) is not None:
            counts["prompts by graphs"] += prompts.stats.replays
        counts["small pools"] += is_small
        counts["preemptions"] += engine.stats.preemptions
        assert not engine.has_work
        memory = engine.memory
        assert memory.held_slots == 0, "KV slots leak"
        assert memory.available_rows == memory.pool.size, "rows leak"


def _engine(draw, target, model, drafter, spec, generation, group, has_masks):
    """Create an engine with random sizes, launches and chunks."""
    return SpeculativeEngine(
        model,
        drafter,
        spec=spec,
        sizes=BufferSizes(
            REQUESTS, CONTEXT, target.hidden_size, target.vocab_size, target.dtype,
            page_size=spec.page_size,
        ),
        batch_sizes=draw.choice([[3], [1, 3], [1, 2, 3]]),
        device="cpu",
        generation=generation,
        steps_per_launch=draw.randint(1, 6),
        chunked_prefill_size=draw.choice([1, 3, 7, 64]),
        prefill_sizes=draw.choice([(), (1, 4, 16), (7, 64)]),
        group=group,
        structured_output=has_masks,
    )  # fmt: skip


def _serve(engine, target, forward, texts, draw, counts, most, *, has_faults):
    """Submit, step, abort and fail at random, and compare the texts."""
    waiting, masks = [], random.Random(f"masks of {draw.getstate()[1][:4]}")
    for _ in range(draw.randint(2, 6)):
        prompt = [draw.randrange(target.vocab_size) for _ in range(draw.randint(1, PROMPT))]
        params = random_params(draw, target.vocab_size, most)
        turns = None
        if engine.structured_output and masks.random() < 0.6:
            turns = target.vocab_size, (count := masks.randint(2, 4)), masks.randrange(count)
        alone = decoded_alone(target, prompt, params, turns)
        known = None
        if target.dtype is torch.float32:
            known = plain_text(target.logits_after, prompt, params, params.max_new_tokens, turns)
        texts.append([*prompt, *alone[0]])
        waiting.append((prompt, params, turns, alone, known))
    expected, faults, lengths = {}, draw.choice([0, 0, 1, 1, 2, 3]), random.Random(len(texts))
    faults *= has_faults
    for _ in range(900):
        mix_lengths(engine, lengths)
        for _ in range(min(len(waiting), draw.randint(0, 2))):
            prompt, params, turns, *known = waiting.pop()
            matcher = None if turns is None else Turns(*turns)
            counts["requests with masks"] += turns is not None
            expected[engine.submit(prompt, params, matcher=matcher)] = known
        if expected and draw.random() < 0.03:
            engine.abort(draw.choice(list(expected)))
        if not engine.has_work and not waiting:
            break
        has_fault = bool(faults) and draw.random() < 0.4
        faults -= has_fault
        try:
            if has_fault:
                _step_with_fault(engine, forward, draw, counts)
            else:
                engine.step()
        except ReplayError as error:  # the step after an interrupt in a call of a matcher
            if [request.is_matching for request in expected if request.error is error] != [True]:
                raise
            counts["requests with an interrupted matcher"] += 1
    else:
        raise AssertionError("the engine has work after 900 steps")
    for request, ((text, logprobs), known) in expected.items():
        counts[f"ended: {request.finish_reason.name}"] += 1
        counts["tokens"] += len(request.output_ids)
        counts["sampled requests"] += request.sampling.temperature > 0
        if request.finish_reason in (FinishReason.ABORTED, FinishReason.FAILED):
            text = text[: len(request.output_ids)]
        counts["requests with processors"] += has_processors(request.sampling)
        assert request.output_ids == text, (request, text)
        if request.sampling.logprobs:
            assert request.logprobs == logprobs[: len(text)], (request, logprobs)
        if known is not None:
            _compare_with_formulas(request, *known, counts)


def _compare_with_formulas(request, text, logprobs, certain, counts):
    """Compare a request with what ``plain_text`` returns, as far as rounding cannot change it."""
    certain = min(certain, len(request.output_ids))
    counts["cut off at a near tie"] += certain < len(request.output_ids)
    assert request.output_ids[:certain] == text[:certain], (request, text)
    pairs = [*zip(request.logprobs, logprobs, strict=False)][:certain]
    assert all(abs(got - want) < CLOSE_LOGPROBS for got, want in pairs), (request, logprobs)


def _step_with_fault(engine, forward, draw, counts):
    """Step with an interrupt at a random line, or with a forward that fails."""
    if draw.random() < 0.7:
        counts["interrupts"] += 1
        try:
            with raising_after(int(10 ** draw.uniform(0, 3.6)), KeyboardInterrupt()):
                engine.step()
        except KeyboardInterrupt:
            counts["interrupted steps"] += 1
    else:
        forward.countdown = draw.randint(1, 3)
        try:
            engine.step()
        except FaultError:
            counts["failed steps"] += 1
        forward.countdown = -1


def run_all(seeds, group=None):
    """Run engines; return what was counted, and the differences."""
    torch.set_num_threads(1)
    counts, differences = Counter(), []
    for seed in seeds:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            with exact_sums():
                one_run(seed, counts, group)
        except Exception as error:
            differences.append(f"run {seed}: {type(error).__name__}: {str(error)[:500]}")
            sys.stderr.write(f"{differences[-1]}\n")
    faulthandler.cancel_dump_traceback_later()
    return counts, differences


def run_rank(rank, ranks, folder, seeds):
    """Run engines as one of several ranks with the same requests; see ``run_all``."""
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        return run_all(seeds, RankGroup(same_batch=True, time_limit=HANG_S / 2))
    finally:
        dist.destroy_process_group()


def main(argv=None):
    """Run the command. The exit code is 1 if a text differed, memory leaked or a run hung."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3000, help="random engines (3,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run (0)")
    parser.add_argument("--out", type=Path, help="write the report to this JSON file")
    parser.add_argument("--processes", type=int, default=1, help="processes that share them (1)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that run each of them (1)")
    options = parser.parse_args(argv)
    seeds = range(options.seed, options.seed + options.runs)
    counts, differences, began = Counter(), [], time.perf_counter()
    with ExitStack() as stack:
        workers = max(options.processes, options.ranks)
        folder = stack.enter_context(TemporaryDirectory())  # left after the processes
        pool = stack.enter_context(ProcessPoolExecutor(workers, get_context("spawn")))
        if options.ranks > 1:
            run = partial(run_rank, ranks=options.ranks, folder=folder, seeds=seeds)
            done = list(pool.map(run, range(options.ranks)))[:1]
        else:
            done = pool.map(run_all, [seeds[first::workers] for first in range(workers)])
        for some_counts, some_differences in done:
            counts += some_counts
            differences += some_differences
    seconds = time.perf_counter() - began
    report = BenchReport(
        name=f"random engines{' under faults' * (options.ranks == 1)}: text against plain decoding",
        environment=environment(torch.device("cpu")),
        settings={"runs": options.runs, "seed": options.seed, "ranks": options.ranks},
        measures=(
            Measure(name="differences, leaks and hangs", value=len(differences), unit="", bar=0),
            *(Measure(name=name, value=value, unit="") for name, value in sorted(counts.items())),
            Measure(name="time", value=seconds, unit="s"),
        ),
    )
    if options.out:
        options.out.write_text(report.to_json())
    Console(width=120).print(bench_view(report))
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
