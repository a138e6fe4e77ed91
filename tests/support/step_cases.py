"""Ops of a whole step: random arguments, and models in plain Python.

``CASES[name]`` are an op, ``make(requests, seed)`` with its arguments, and its model, which takes
them and returns the results as lists.
"""

from __future__ import annotations

import math
from random import Random

import torch

from graphkit.config import bitmask_words
from graphkit.ops import processors
from graphkit.ops.accepted_path import accepted_moves
from graphkit.ops.logits import apply_token_bitmask, argmax_rows, top_candidates
from graphkit.ops.ngram import append_tokens, ngram_drafts
from graphkit.ops.processors import CHANGES, Kind, process_logits
from graphkit.ops.rejection import accept_by_rejection
from graphkit.ops.sampling import philox_uniform, target_samples
from graphkit.ops.step_rows import (
    draft_step_rows,
    extend_rows,
    first_draft_rows,
    pack_rows,
    verify_rows,
)
from graphkit.ops.step_state import begin_step
from graphkit.ops.target_probs import target_probs
from graphkit.ops.tree import chain_candidates
from graphkit.ops.tree_growth import choose_nodes, grow_tree, plant_tree
from graphkit.ops.verification import accept_tokens

CONTEXT, VOCAB = 23, 7


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def int64(values):
    return torch.tensor(values, dtype=torch.int64)


def numbers(random, count, low, high):
    return [random.randint(low, high) for _ in range(count)]


def table_of(random, requests, longest):
    """Rows, their table and lengths; some rows and positions are outside the table."""
    rows = [random.choice([0, -1, 10_000, *range(1, requests + 3)]) for _ in range(requests)]
    table = int32(numbers(random, (requests + 3) * CONTEXT, 0, 10**6)).view(-1, CONTEXT)
    return int64(rows), table, int32(numbers(random, requests, 1, CONTEXT - longest // 2))


def slots_behind(rows, table, seq_lens, count):
    """The slots behind each request's committed tokens, 0 outside the table."""
    table, slots = table.tolist(), []
    for row, length in zip(rows.tolist(), seq_lens.tolist(), strict=True):
        for column in range(length, length + count):
            is_inside = 0 <= row < len(table) and column < CONTEXT
            slots.append(table[row][column] if is_inside else 0)
    return slots


def begin_args(requests, seed):
    random = Random(seed)
    states = (int32(numbers(random, 12, 0, 2)), int32(numbers(random, 12, 1, 99)))
    return int64(numbers(random, requests, 0, 11)), *states, int64(numbers(random, 12, 0, 2**40))


def begun(rows, remaining, seq_lens, bonus):
    rows = [row if remaining[row] > 0 else 0 for row in rows.tolist()]
    return rows, [seq_lens[row].item() for row in rows], [bonus[row].item() for row in rows]


def first_rows_args(requests, seed):
    topk, steps = 1 + seed % 3, 1 + seed % 4
    return *table_of(Random(seed), requests, topk * steps), topk, steps


def first_rows(rows, table, seq_lens, topk, steps):
    positions = [length for length in seq_lens.tolist() for _ in range(topk)]
    return positions, slots_behind(rows, table, seq_lens, topk * steps)


def step_rows_args(requests, seed):
    random, topk, steps = Random(seed), 1 + seed % 3, 1 + seed % 4
    return (
        int64(numbers(random, requests * topk, 0, 2**40)),
        int64(numbers(random, requests * topk * steps, 0, 2**40)),
        int32(numbers(random, requests, 1, 999)), topk, steps,
    )  # fmt: skip


def step_rows(positions, slots, seq_lens, topk, steps):
    ahead = [step if topk == 1 else topk * (steps - 1) for step in range(steps - 1)]
    return (
        [[position + step for position in positions.tolist()] for step in range(steps - 1)],
        [slots.tolist()[step::steps] for step in range(steps - 1)],
        [[length + more for length in seq_lens.tolist()] for more in ahead],
    )


def chain_args(requests, seed):
    steps = 1 + seed % 4
    tokens = int64(numbers(Random(seed), requests * steps, 0, 2**40)).view(steps, requests)
    return tokens[0][:, None].clone(), tokens[1:].clone(), 1 + seed % (steps + 1)


def chained(first, later, width):
    chains = torch.cat([first, later.t()], 1).tolist()
    parents = [list(range(-1, len(chain) - 1)) for chain in chains]
    return parents, [list(range(width - 1)) for _ in chains], [c[: width - 1] for c in chains]


def tree_of(random, width):
    """Parents of a random tree, with its links and its mask."""
    parents = [-1, *(random.randint(0, node - 1) for node in range(1, width))]
    child, sibling = [-1] * width, [-1] * width
    sees = [{0}]
    for node in range(1, width):
        older = [other for other in range(1, node) if parents[other] == parents[node]]
        (sibling if older else child)[older[-1] if older else parents[node]] = node
        sees.append({node, *sees[parents[node]]})
    return child, sibling, [[other in each for other in range(width)] for each in sees]


def verify_args(is_tree):
    def make(requests, seed):
        random, width = Random(seed), 1 + 7 * seed % 19
        masks = [tree_of(random, width)[2] for _ in range(requests)]
        return (
            *table_of(random, requests, width), int64(numbers(random, requests, 0, 99)),
            int64(numbers(random, requests * width, -2, VOCAB + 2)),
            torch.tensor(masks, dtype=torch.bool).view(-1, width, width) if is_tree else None,
            width, VOCAB,
        )  # fmt: skip

    return make


def verified(rows, table, seq_lens, bonus, drafts, mask, width, vocab):
    tokens = [min(max(token, 0), vocab - 1) for token in drafts.tolist()]
    tokens[::width] = bonus.tolist()
    depths = [*range(width)] * len(rows) if mask is None else (mask.sum(2) - 1).flatten().tolist()
    lengths = seq_lens.repeat_interleave(width).tolist()
    positions = [length + depth for length, depth in zip(lengths, depths, strict=True)]
    return tokens, positions, slots_behind(rows, table, seq_lens, width)


def extend_args(requests, seed):
    random, width = Random(seed), 1 + seed % 6
    drafts = int32(numbers(random, requests, 0, width - 1))
    return int32(numbers(random, requests, 1, 999)), drafts, width


def extended(seq_lens, drafts, width):
    lengths = seq_lens.tolist()
    return (
        [length + width for length in lengths], [width] * len(lengths),
        [length + step for length in lengths for step in range(width)],
        [request * width + count for request, count in enumerate(drafts.tolist())],
    )  # fmt: skip


def map_of(random, vocab):
    return int64(random.sample(range(-(2**40), 2**40), vocab))


def argmax_args(dtype, is_selected, has_map=False):
    def make(requests, seed):
        random, vocab = Random(seed), (1, 5, 300)[seed % 3]
        rows = requests + 4 if is_selected else requests
        values = [-math.inf, -2.5, 0.0, 1.5, 1.5, math.inf][: 3 + seed % 4]
        values += [math.nan] * (seed % 2)
        logits = torch.tensor(random.choices(values, k=rows * vocab), dtype=dtype)
        index = int64(numbers(random, requests, 0, rows - 1)) if is_selected else None
        token_map = map_of(random, vocab) if has_map else None
        return int64([-7] * requests), logits.view(rows, vocab), index, token_map

    return make


def with_processed(make, place):
    """Add processed rows to the arguments of an op, behind its logits at a place."""

    def make_more(requests, seed):
        args, random = make(requests, seed), Random(seed)
        rows = len(args[place])
        replaced = torch.randn(args[place].shape, generator=torch.Generator().manual_seed(seed))
        flags = torch.tensor([random.random() < 0.5 for _ in range(rows)], dtype=torch.bool)
        return *args, replaced, flags

    return make_more


def replaced(logits, processed, is_processed):
    """Rows of logits, some replaced."""
    if processed is None:
        return logits.double()
    return torch.where(is_processed[:, None], processed.double(), logits.double())


def best_of_rows(tokens, logits, index, token_map, processed=None, is_processed=None):
    """The first NaN, or the first of the largest numbers."""
    rows = replaced(logits, processed, is_processed).tolist()
    rows = rows if index is None else [rows[each] for each in index.tolist()]
    keys = [[math.inf if math.isnan(x) else x for x in row] for row in rows]
    nans = [[i for i, x in enumerate(row) if math.isnan(x)] for row in rows]
    best = [nan[0] if nan else row.index(max(row)) for nan, row in zip(nans, keys, strict=True)]
    return (best if token_map is None else [int(token_map[each]) for each in best],)


def accept_args(requests, seed):
    random, width = Random(seed), 1 + 5 * seed % 9
    trees = [tree_of(random, width) for _ in range(requests)]
    links = [int64([tree[i] for tree in trees]).view(requests, width) for i in (0, 1)]
    if seed % 3 == 2:  # links of no tree
        links = [int64(numbers(random, requests * width, -2, width)).view_as(links[0])] * 2
    tokens = [int64(numbers(random, requests * width, 0, 2)) for _ in "ct"]
    longest = random.randint(1, width)
    return tokens[0].view(requests, width), *links, tokens[1], longest


def walked(tokens, child, sibling, accepts, longest):
    """The nodes that a walk accepts: ``accepts(node, child)`` for each child in turn."""
    path, node, tried = [0], child[0], 0
    while 0 <= node < len(tokens) and tried < len(tokens) - 1 and len(path) < longest:
        tried += 1
        is_accepted = accepts(path[-1], node)
        path += [node] * is_accepted
        node = (child if is_accepted else sibling)[node]
    return path


def results_of(paths, tokens, width, longest):
    predict = [after + [0] * (width - len(after)) for after in tokens]
    index = [[b * width + node for node in path] for b, path in enumerate(paths)]
    index = [each + [-1] * (longest - len(each)) for each in index]
    drafts = [len(path) - 1 for path in paths]
    return [t for each in predict for t in each], index, drafts, [n + 1 for n in drafts]


def accepted(candidates, child, sibling, target, longest):
    width, paths, tokens = candidates.shape[1], [], []
    wanted_of = target.view_as(candidates).tolist()
    for tree, wanted in zip(
        zip(candidates.tolist(), child.tolist(), sibling.tolist(), strict=True),
        wanted_of,
        strict=True,
    ):
        tokens_of = tree[0]
        paths.append(
            walked(*tree, lambda node, child, w=wanted, t=tokens_of: w[node] == t[child], longest)
        )
        tokens.append([wanted[node] for node in paths[-1]])
    return results_of(paths, tokens, width, longest)


def samples_args(requests, seed):
    random, width = Random(seed), 1 + 5 * seed % 9
    probs = distributions_of(random, requests * width)
    positions = int64(numbers(random, requests * width, 0, 9999)).view(requests, width)
    rows, seeds, _ = draws_of(random, requests)
    if seed % 3 == 2:  # the rows of damaged logits, and those whose samples no sum exceeds
        probs[::5], probs[1::5] = 0, probs[1::5] * math.inf
    return probs, rows, seeds, positions


def distributions_of(random, count):
    """Distributions of multiples of 1/64, a quarter of them certain."""
    probs = torch.zeros(count, VOCAB)
    for row in probs:
        for token in random.choices(range(VOCAB), k=random.choice([1, 64, 64, 64])):
            row[token] += 1
        row /= row.sum()
    return probs


def draws_of(random, requests):
    """Rows of requests, and seeds and positions by row."""
    states = int64(numbers(random, 9, -(2**62), 2**62)), int32(numbers(random, 9, 0, 9999))
    return int64(numbers(random, requests, 0, 8)), *states


def sampled(probs, rows, seeds, positions):
    """The first token whose running sum exceeds the sample, or the most probable one."""
    drawn = []
    for node, row in enumerate(probs.double().tolist()):
        request, column = divmod(node, positions.shape[1])
        position = positions[request, column : column + 1].int()
        coin = philox_uniform(seeds[rows[request : request + 1]], position, 1).item()
        sums = [sum(row[: i + 1]) for i in range(VOCAB)]
        is_finite = 0 < sums[-1] < math.inf
        known = [-1 if math.isnan(x) else x for x in row]
        best = known.index(max(known))
        drawn.append(next(i for i in range(VOCAB) if sums[i] > coin) if is_finite else best)
    return (drawn,)


def rejection_args(requests, seed):
    """Half of the trees have all nodes below the root; drafts are often refused."""
    candidates, *links, _, longest = accept_args(requests, 3 * seed)
    random, width = Random(-seed - 1), candidates.shape[1]
    probs, draws = distributions_of(random, candidates.numel()), draws_of(random, requests)
    if seed % 2:
        longest = width
        siblings = [-1, *range(2, width), -1][:width]
        links = [int64([1 % width or -1] + [-1] * (width - 1)), int64(siblings)]
        links = [each.repeat(requests, 1) for each in links]
        candidates = int64(numbers(random, requests * width, -1, 4)).view(requests, width)
    draft_probs = distributions_of(random, len(probs))
    if seed % 2:
        probs, draft_probs = (probs + 0.01) ** 2, (draft_probs + 0.01) ** 2
        probs[:, :4] /= 3
        draft_probs[:, 4:] /= 3
        probs, draft_probs = (each / each.sum(1, keepdim=True) for each in (probs, draft_probs))
    return candidates, *links, probs, draft_probs, *draws, longest


def kept_by_rejection(
    candidates, child, sibling, probs, draft_probs, rows, seeds, positions, longest
):
    width, paths, tokens = candidates.shape[1], [], []
    coins = philox_uniform(seeds[rows], positions[rows], width + 1).double().tolist()
    p_of, q_of = (each.double().view(-1, width, VOCAB).tolist() for each in (probs, draft_probs))
    for tree, coin, p, q, *links in zip(
        candidates.tolist(), coins, p_of, q_of, child.tolist(), sibling.tolist(), strict=True
    ):

        def accepts(node, draft, tree=tree, coin=coin, p=p, q=q):
            token, target, drafted = tree[draft], p[node], q[node]
            if token < 0 or not drafted[token]:
                return False
            share = [x / sum(drafted) for x in drafted]
            if coin[draft] * share[token] < target[token]:
                return True
            left = [max(x - y, 0) for x, y in zip(target, share, strict=True)]
            p[node] = [x / sum(left) for x in left]
            drafted[token] = 0
            return False

        path = walked(tree, *links, accepts, longest)
        last = p[path[-1]]
        drawn = next(i for i in range(VOCAB) if last[i] and sum(last[: i + 1]) > coin[width])
        paths.append(path)
        tokens.append([tree[node] for node in path[1:]] + [drawn])
    return results_of(paths, tokens, width, longest)


def probs_args(requests, seed):
    """Half of the requests have no filter; of bfloat16, some logits are equal."""
    random, width, vocab = Random(seed), 1 + seed % 3, (1, 5, 300)[seed % 3]
    logits = torch.tensor([random.gauss(0, 5) for _ in range(requests * width * vocab)])
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    rows = int64(numbers(random, requests, 0, 11))
    return (
        logits.view(-1, vocab).to(dtype), rows,
        torch.tensor([0.0, 1.0, 0.3, 1e-20, 1e-44, 50.0] * 2),
        int32([0] * 6 + [random.choice([-1, 0, 1, 2, 40, 400]) for _ in range(6)]),
        torch.tensor([1.0] * 6 + [random.choice([1.0, 0.9, 0.5, 1e-3, 1e-50]) for _ in range(6)]),
        torch.tensor([0.0] * 6 + [random.choice([0.0, 0.01, 0.3, 1.0]) for _ in range(6)]),
        width,
    )  # fmt: skip


def distributions(
    logits, rows, temperatures, top_ks, top_ps, min_ps, width, processed=None, is_processed=None
):
    result = []
    for row, each in enumerate(replaced(logits, processed, is_processed).tolist()):
        request, best = rows[row // width], each.index(max(each))
        temperature = temperatures[request].item()
        if temperature == 0:
            result.append([float(token == best) for token in range(len(each))])
            continue
        weights = [math.exp((x - each[best]) / temperature) for x in each]
        for keep in (
            lambda ranked, k=top_ks[request]: ranked[: k if k > 0 else None],
            lambda ranked, p=top_ps[request]: nucleus(ranked, p.item()),
            lambda ranked, p=min_ps[request]: [w for w in ranked if w >= p.item()],
        ):
            least = min(keep(sorted(weights, reverse=True)))
            weights = [weight * (weight >= least) for weight in weights]
        result.append([weight / sum(weights) for weight in weights])
    return (result,)


def nucleus(ranked, share):
    """The fewest of the largest weights that have a share of their sum."""
    enough = (n for n in range(1, len(ranked)) if sum(ranked[:n]) >= share * sum(ranked))
    return ranked[: next(enough, None) if share < 1 else None]


def top_args(topk, has_temperature, is_selected, has_map=False):
    def make(requests, seed):
        """Distinct logits, some of them -inf: the order of equal ones is not defined on the CPU."""
        random, vocab = Random(seed), (topk, 7, 300)[seed % 3]
        rows = requests + 3 if is_selected else requests
        logits = [random.sample(range(-4 * vocab, 4 * vocab), vocab) for _ in range(rows)]
        logits = torch.tensor(logits, dtype=torch.float32).view(rows, vocab) / 8
        logits[:, topk:][logits[:, topk:] < -vocab / 8] = -math.inf
        dtype = (torch.float32, torch.float64)[seed % 2]
        temperature = torch.tensor([random.choice([0.3, 1.0, 2.5]) for _ in range(requests)])
        return (
            logits.to(dtype), topk, temperature if has_temperature else None,
            int64(numbers(random, requests, 0, rows - 1)) if is_selected else None,
            map_of(random, vocab) if has_map else None,
        )  # fmt: skip

    return make


def best_tokens(logits, topk, temperature, index, token_map):
    rows = logits.double() if index is None else logits[index].double()
    rows = rows if temperature is None else rows / temperature[:, None].double()
    probs, tokens = [], []
    for row in rows.tolist():
        ranked = sorted(range(len(row)), key=lambda token, row=row: -row[token])[:topk]
        weights = [math.exp(x - max(row)) for x in row]
        probs.append([weights[token] / sum(weights) for token in ranked])
        tokens.append(ranked if token_map is None else token_map[ranked].tolist())
    return probs, tokens


SCORES = [0.0, 0.25, 0.5, 0.5, 1.0, math.inf, math.nan]
"""Many of them equal."""


def scores_of(random, *shape, seed):
    values = SCORES[: 5 + seed % 3]
    return torch.tensor(random.choices(values, k=math.prod(shape))).view(shape)


def plant_args(requests, seed):
    random, topk, steps = Random(seed), 1 + seed % 5, 1 + seed % 4
    tokens = int64(numbers(random, requests * topk, 0, 2**40)).view(requests, topk)
    return scores_of(random, requests, topk, seed=seed), tokens, steps


def planted(topk_p, topk_index, steps):
    """Of scores, tokens and parents, those of step 0."""
    requests, topk = topk_p.shape
    parents = list(range(-1, topk))[: topk * (steps - 1) + 1]
    masks = [[k * steps == slot for slot in range(topk * steps)] for k in range(topk)]
    rows = [request for request in range(requests) for _ in range(topk)]
    return topk_p, topk_index, [parents] * requests, rows, [masks] * requests


def of_step_0(results, args):
    """The results of ``plant_tree`` without what it leaves undefined."""
    scores, tokens, parents, rows, mask = results
    topk = args[0].shape[1]
    return scores[:, :topk], tokens[:, :topk], parents[:, : topk + 1], rows, mask


def grow_args(requests, seed):
    random, topk, steps = Random(seed), 1 + seed % 5, 2 + seed % 3
    count, step = topk + (steps - 1) * topk * topk, random.randint(1, steps - 1)
    parents = torch.full((requests, topk * (steps - 1) + 1), -7)
    masks = numbers(random, requests * topk * topk * steps, 0, 1)
    return (
        torch.full((requests, count), 9.0), torch.full((requests, count), -7), parents,
        scores_of(random, requests, topk, seed=seed),
        scores_of(random, requests * topk, topk, seed=seed),
        int64(numbers(random, requests * topk * topk, 0, 2**40)).view(requests * topk, topk),
        torch.tensor(masks, dtype=torch.bool).view(requests, topk, topk * steps), step,
    )  # fmt: skip


def ranked(scores):
    """Indices by descending score: NaN first, then the smaller index first."""
    return sorted(range(len(scores)), key=lambda i: (not math.isnan(scores[i]), -scores[i], i))


def grown(scores, tokens, parents, branch_scores, topk_p, topk_index, mask, step):
    scores, tokens, parents = scores.clone(), tokens.clone(), parents.clone()
    (requests, topk), steps = branch_scores.shape, mask.shape[2] // mask.shape[1]
    first, column = topk + (step - 1) * topk * topk, topk * step + 1
    results = [], [], [], [], []
    for b in range(requests):
        children = slice(b * topk, (b + 1) * topk)
        new = (branch_scores[b][:, None] * topk_p[children]).flatten()
        scores[b, first : first + topk * topk] = new
        tokens[b, first : first + topk * topk] = topk_index[children].flatten()
        order = ranked(new.tolist())[:topk]
        if column < parents.shape[1]:
            parents[b, column : column + topk] = int64([first + i for i in order])
        before = [i // topk for i in order]
        seen = mask[b][before]
        seen[range(topk), [k * steps + step for k in range(topk)]] = True
        values = (
            new[order].tolist(), topk_index[children].flatten()[order].tolist(), before,
            [b * topk + i for i in before], seen.tolist(),
        )  # fmt: skip
        for result, value in zip(results, values, strict=True):
            result.append(value)
    rows = [row for each in results[3] for row in each]
    return *results[:3], rows, results[4], scores, tokens, parents


def choose_args(requests, seed):
    random, count = Random(seed), 1 + 11 * seed % 200
    tokens = int64(numbers(random, requests * count, 0, 2**40)).view(requests, count)
    return scores_of(random, requests, count, seed=seed), tokens, 1 + count * (seed % 5) // 4


def chosen(scores, tokens, width):
    numbers = [sorted(ranked(row)[: width - 1]) for row in scores.tolist()]
    tokens = tokens.tolist()
    return numbers, [[tokens[b][i] for i in row] for b, row in enumerate(numbers)]


def text_args(requests, seed):
    """Texts of few words; a fifth of the requests are pads."""
    random, context = Random(seed), (9, 40, 300)[seed % 3]
    rows = random.sample(range(1, requests + 3), requests)
    words = random.choice([1, 2, 5])
    text = int64(numbers(random, (requests + 3) * context, 0, words)).view(-1, context)
    lengths = [random.choice([1, context - 1, random.randint(1, context - 1)]) for _ in rows]
    rows = int64([row if random.random() < 0.8 else 0 for row in rows])
    return random, text, rows, int32(lengths), words


def ngram_args(requests, seed):
    random, text, rows, lengths, words = text_args(requests, seed)
    bonus = int64(numbers(random, requests, 0, words))
    if seed % 6 == 5:  # a match at the first token continues in the row before
        text[:, :4], text[:, -1], bonus[:], lengths[:] = int64([5, 1, 5, 7]), 7, 5, 4
    return text, rows, lengths, bonus, 1 + seed % 4, 1 + 5 * seed % 11


def ngrams(text, rows, seq_lens, bonus, topk, width):
    text, drafts = text.clone(), []
    for row, last, token in zip(rows.tolist(), seq_lens.tolist(), bonus.tolist(), strict=True):
        own = [*text[row, :last].tolist(), token]

        def score(end, own=own, last=last):
            pairs = zip(own[end::-1], own[last::-1], strict=False)
            equal = [*[one == other for one, other in pairs][:4], False]
            return equal.index(False), end

        ends = sorted(range(last), key=score, reverse=True)[:topk]
        ends += [last - 1] * (topk - len(ends))
        followers = [own[end + 1 :] for end in ends]
        chains = [(node % topk, node // topk) for node in range(width - 1)]
        drafts.append([token] + [followers[k][d % len(followers[k])] for k, d in chains])
        if row:
            text[row, last] = token
    return drafts, text


def append_args(requests, seed):
    random, *args, words = text_args(requests, seed)
    width = 1 + 5 * seed % 11
    return *args, int64(numbers(random, requests * width, 0, words)), width


def appended(text, rows, seq_lens, predict, width):
    text = text.clone()
    tokens = predict.view(-1, width).tolist()
    for row, last, new in zip(rows.tolist(), seq_lens.tolist(), tokens, strict=True):
        if row:
            room = text.shape[1] - last - 1
            text[row, last + 1 : last + 1 + width] = int64(new[:room])
    return (text,)


def pack_args(requests, seed):
    random, width = Random(seed), 1 + seed % 6
    drafts = [random.randint(-1, width - 1) for _ in range(requests)]
    nodes = sum(drafts) + requests
    every = [int64(numbers(random, requests * width, 1, 2**40)) for _ in range(3)]
    rows = int64(numbers(random, requests, 0, 99))
    return int32(drafts), rows, *every, width, max(1, nodes + random.choice([0, 0, 3]))


def packed(drafts, rows, tokens, positions, slots, width, count):
    """The packed nodes one after the other; rows of nodes that are not packed are the op's own."""
    lengths, nodes = (drafts + 1).tolist(), []
    row_of, following = [], []
    for b, length in enumerate(lengths):
        row_of += [len(nodes) + min(i, max(length - 1, 0)) for i in range(width)]
        following.append([i + 1 if i + 1 < length else -1 for i in range(width)])
        nodes += [b * width + i for i in range(length)]
    values = [[each[node].item() for node in nodes] for each in (tokens, positions, slots)]
    behind = [0] * (count - len(nodes))
    columns = [[rows[node // width].item() for node in nodes], *values]
    return (
        lengths, nodes + [-1] * len(behind), *(column + behind for column in columns),
        [min(row, count - 1) for row in row_of], following,
    )  # fmt: skip


def moves_args(requests, seed):
    _, index, *_ = accept_tokens(*(args := accept_args(requests, seed)))
    width = args[0].shape[1]
    return index, int64(numbers(Random(seed), requests * width, 1, 2**40)), width


def moves(index, slots, width):
    slots, targets, sources = slots.tolist(), [], []
    for request, path in enumerate(index.tolist()):
        for column, node in enumerate(path):
            targets.append(slots[request * width + column] if node >= 0 else 0)
            sources.append(slots[node] if node >= 0 else 0)
    return targets, sources


def bitmask_args(dtype):
    def make(requests, seed):
        random, vocab = Random(seed), (1, 31, 32, 33, 70, 300)[seed % 6]
        values = [-math.inf, -2.5, 0.0, 1.5, math.inf, math.nan]
        logits = torch.tensor(random.choices(values, k=requests * vocab), dtype=dtype)
        words = [random.choice([-1, 0, -(2**31), random.getrandbits(31)]) for _ in range(99)]
        words = random.choices(words, k=requests * bitmask_words(vocab))
        return logits.view(requests, vocab), int32(words).view(requests, bitmask_words(vocab))

    return make


def masked(logits, bitmask):
    rows, words = logits.tolist(), bitmask.tolist()
    for row, of_row in zip(rows, words, strict=True):
        bits = "".join(f"{word % 2**32:032b}"[::-1] for word in of_row)
        for token in range(len(row)):
            row[token] = row[token] if bits[token] == "1" else -math.inf
    return (rows,)


def process_args(dtype, is_tree):
    """Requests with and without processors. Few tokens, so that paths repeat those of texts."""

    def make(requests, seed):
        random, vocab, width = Random(seed), (2, 5, 300)[seed % 3], 1 + 5 * seed % 9
        size, nodes, few = 12, requests * width, min(vocab, 6)
        masks = [tree_of(random, width)[2] for _ in range(requests)]
        biased = [random.sample(range(vocab), min(vocab, 4)) for _ in range(size)]
        biased = [ids[: random.randint(0, 4)] for ids in biased]
        values = [-math.inf, -2.5, 0.0, 1.5, 30.0]
        logits = torch.tensor(random.choices(values, k=nodes * vocab), dtype=dtype)
        return (
            logits.view(nodes, vocab), int64(random.sample(range(size), requests))
            if requests <= size else int64(numbers(random, requests, 0, size - 1)),
            int64(numbers(random, nodes, 0, few - 1)).view(requests, width),
            torch.tensor(masks, dtype=torch.bool).view(-1, width, width) if is_tree else None,
            int64(numbers(random, nodes, 0, 9)),
            int32([0, 0, 15, *numbers(random, size - 3, 0, 15)]),
            int32(numbers(random, size * vocab, 0, 5)).view(size, vocab),
            torch.tensor([[random.choice([0.5, 1.0, 1.3]), *random.choices([-1.5, 0.0, 0.7], k=2)]
                          for _ in range(size)]),
            int32([ids + [-1] * (5 - len(ids)) for ids in biased]),
            torch.tensor([random.choices([-math.inf, -1.0, 2.0], k=5) for _ in range(size)]),
            int32(numbers(random, size, 0, 12)),
            int64([[random.randint(-1, vocab - 1) for _ in range(3)] for _ in range(size)]),
        )  # fmt: skip

    return make


def packed_process_args(requests, seed):
    """Some nodes of chains, each request's first ones, and pads behind them."""
    random = Random(-seed)
    logits, rows, candidates, _, positions, *others = process_args(torch.float32, False)(
        requests, seed
    )
    width = candidates.shape[1]
    kept = [random.randint(0, width) for _ in range(requests)]
    nodes = [b * width + i for b, count in enumerate(kept) for i in range(count)]
    pads = random.randint(0, 3) * bool(requests)
    index = int64([*nodes, *[0] * pads])
    return (
        logits[index], rows, candidates, None, positions[index], *others,
        int64([*nodes, *[-1] * pads]),
    )  # fmt: skip


def processed_logits(
    logits, rows, candidates, mask, positions, kinds, counts, penalties, bias_ids, biases, least,
    stops, nodes=None,
):  # fmt: skip
    """The formulas, token by token; 0 where the op leaves results undefined."""
    width, result, flags, sums = candidates.shape[1], [], [], []
    nodes = range(len(logits)) if nodes is None else nodes.tolist()
    for number, line in enumerate(logits.double().tolist()):
        if nodes[number] < 0:
            flags.append(False)
            result.append([0.0] * len(line))
            sums.append([0.0] * -(-len(line) // processors.PART))
            continue
        request, node = divmod(nodes[number], width)
        row, tree = rows[request], candidates[request].tolist()
        kind = Kind(int(kinds[row]))
        seen = range(node + 1) if mask is None else mask[request, node].nonzero().flatten().tolist()
        path = [tree[other] for other in seen if other]
        bias = dict(zip(bias_ids[row].tolist(), biases[row].tolist(), strict=True))
        repetition, presence, frequency = penalties[row].tolist()
        is_early = positions[number] + 1 < least[row]
        after = []
        for token, x in enumerate(line):
            if kind & Kind.BIAS:
                x += bias.get(token, 0)
            if kind & Kind.LEAST_LENGTH and is_early and token in stops[row]:
                x = -math.inf
            if kind & Kind.PENALTIES:
                before = int(counts[row, token])
                if before or token in path:
                    x = x / repetition if x > 0 else x * repetition
                n = before // 2 + path.count(token)
                x -= frequency * n + presence * (n > 0)
            after.append(x)
        flags.append(bool(kind & CHANGES))
        result.append(after if flags[-1] else [0.0] * len(line))
        parts = [line[i : i + processors.PART] for i in range(0, len(line), processors.PART)]
        totals = [sum(map(math.exp, part)) for part in parts]
        totals = [math.log(total) if total else -math.inf for total in totals]
        sums.append(totals if kind & Kind.LOGPROBS else [0.0] * len(parts))
    return result, flags, sums


def of_processed_rows(returned, args):
    """The results of ``process_logits``, with 0 where they are undefined."""
    logits, is_processed, log_sums = returned
    width = args[2].shape[1]
    nodes = torch.arange(len(logits), device=logits.device) if len(args) < 13 else args[12]
    kinds = args[5][args[1]].repeat_interleave(width)
    kinds = torch.where(nodes < 0, 0, kinds[nodes.clamp(min=0)]) if len(kinds) else kinds[:0]
    has_sums = (kinds & Kind.LOGPROBS != 0)[:, None]
    return (
        torch.where(is_processed[:, None], logits, 0), is_processed,
        torch.where(has_sums, log_sums, 0),
    )  # fmt: skip


CASES = {
    "begin_step": (begin_step, begin_args, begun),
    "first_draft_rows": (first_draft_rows, first_rows_args, first_rows),
    "draft_step_rows": (draft_step_rows, step_rows_args, step_rows),
    "chain_candidates": (chain_candidates, chain_args, chained),
    "verify_rows of chains": (verify_rows, verify_args(is_tree=False), verified),
    "verify_rows of trees": (verify_rows, verify_args(is_tree=True), verified),
    "pack_rows": (pack_rows, pack_args, packed),
    "extend_rows": (extend_rows, extend_args, extended),
    "argmax_rows": (argmax_rows, argmax_args(torch.float32, False), best_of_rows),
    "argmax_rows of bfloat16": (argmax_rows, argmax_args(torch.bfloat16, False), best_of_rows),
    "argmax_rows of some rows": (argmax_rows, argmax_args(torch.float64, True), best_of_rows),
    "argmax_rows with a map": (argmax_rows, argmax_args(torch.float32, True, True), best_of_rows),
    "apply_token_bitmask": (apply_token_bitmask, bitmask_args(torch.float32), masked),
    "apply_token_bitmask of bfloat16": (apply_token_bitmask, bitmask_args(torch.bfloat16), masked),
    "argmax_rows of processed rows": (
        argmax_rows,
        with_processed(argmax_args(torch.bfloat16, False), 1),
        best_of_rows,
    ),
    "process_logits of chains": (
        process_logits,
        process_args(torch.float32, False),
        processed_logits,
    ),
    "process_logits of trees": (
        process_logits,
        process_args(torch.bfloat16, True),
        processed_logits,
    ),
    "process_logits of float64": (
        process_logits,
        process_args(torch.float64, True),
        processed_logits,
    ),
    "process_logits of packed rows": (process_logits, packed_process_args, processed_logits),
    "accept_tokens": (accept_tokens, accept_args, accepted),
    "target_samples": (target_samples, samples_args, sampled),
    "accept_by_rejection": (accept_by_rejection, rejection_args, kept_by_rejection),
    "target_probs": (target_probs, probs_args, distributions),
    "target_probs of processed rows": (target_probs, with_processed(probs_args, 0), distributions),
    "accepted_moves": (accepted_moves, moves_args, moves),
    "top_candidates of 1": (top_candidates, top_args(1, False, True), best_tokens),
    "top_candidates of 4": (top_candidates, top_args(4, False, False), best_tokens),
    "top_candidates of some rows": (top_candidates, top_args(3, True, True), best_tokens),
    "top_candidates with a map": (top_candidates, top_args(2, False, True, True), best_tokens),
    "top_candidates of 1 with a map": (top_candidates, top_args(1, True, False, True), best_tokens),
    "plant_tree": (plant_tree, plant_args, planted),
    "grow_tree": (grow_tree, grow_args, grown),
    "choose_nodes": (choose_nodes, choose_args, chosen),
    "ngram_drafts": (ngram_drafts, ngram_args, ngrams),
    "append_tokens": (append_tokens, append_args, appended),
}

WRITTEN = {
    argmax_rows: 1, apply_token_bitmask: 1, grow_tree: 3, ngram_drafts: 1, append_tokens: 1,
}  # fmt: skip
"""How many arguments an op writes: its first ones."""


def results(op, returned, args):
    """What a call returned, and the arguments that it has written."""
    returned = returned if isinstance(returned, tuple) else (returned,)
    returned = of_step_0(returned, args) if op is plant_tree else returned
    returned = of_processed_rows(returned, args) if op is process_logits else returned
    return [each for each in returned if each is not None] + list(args[: WRITTEN.get(op, 0)])


def assert_equal(got, want):
    """Compare tensors with tensors or lists; floats within the rounding of float32."""
    for one, other in zip(got, want, strict=True):
        is_list = not isinstance(other, torch.Tensor)
        other = torch.tensor(other, dtype=one.dtype).view(one.shape) if is_list else other
        assert one.dtype == other.dtype
        tolerance = 1e-4 * one.is_floating_point()
        torch.testing.assert_close(one.cpu(), other, rtol=tolerance, atol=1e-9, equal_nan=True)
