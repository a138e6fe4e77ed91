"""Convolutions, scans and commits of recurrent layers against float64, and their bits.

Every case runs random chains, trees in any order of their nodes, or prompts of any lengths, with
pads among the requests, on states in random rows. What the ops do not write keeps its bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

from graphkit.errors import AttentionError
from graphkit.ops.recurrent import causal_conv, commit_scans, linear_scan, update_size
from op_devices import CPU, CUDA, INTERPRETER, LOOPS, by

WIDTH = 5
ROWS = 7
POISON = 1e4


@dataclass(frozen=True)
class Kind:
    """Shapes and arguments of one kind of scan."""

    heads: int
    groups: int
    keys: int
    values: int
    decay: str
    delta: bool = False
    steps: bool = False
    transposed: bool = False


KINDS = {
    "gated delta rule": Kind(4, 2, 16, 8, "head", delta=True),
    "delta rule of odd sizes": Kind(3, 3, 12, 20, "head", delta=True),
    "KDA": Kind(2, 2, 16, 16, "key", delta=True),
    "Mamba 2": Kind(4, 2, 16, 8, "head", steps=True, transposed=True),
    "Mamba": Kind(1, 1, 4, 70, "value", steps=True, transposed=True),
}
STEPS = [("chain", 1), ("chain", 4), ("chain", WIDTH), ("tree", 4), ("tree", WIDTH)]
CASES = [*product(KINDS, STEPS), *product(KINDS, [("prompt", 1), ("prompt", 9)])]
by_case = pytest.mark.parametrize(
    ("kind", "shape"), CASES, ids=[f"{kind}, {shape} of {n}" for kind, (shape, n) in CASES]
)
runs = by(CPU, INTERPRETER, CUDA, interpreted=[LOOPS])


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


def places(generator, shape, nodes):
    """Return rows of requests, begins or None, parents and order or None; pads among them."""
    rows = torch.randperm(ROWS - 1, generator=generator)[:3] + 1
    rows = torch.cat([rows[:2], torch.zeros(1, dtype=torch.int64), rows[2:]])
    if shape == "prompt":
        lengths = torch.randint(0, nodes + 1, (4,), generator=generator)
        lengths[1] = nodes
        return rows, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), None, None
    if shape == "chain":
        return rows, None, None, None
    parents = torch.full((4, nodes), -1)
    order = torch.stack([torch.randperm(nodes, generator=generator) for _ in range(4)])
    for request, place in product(range(4), range(1, nodes)):
        above = int(torch.randint(-1, place, (1,), generator=generator))
        parents[request, order[request, place]] = order[request, above] if above >= 0 else -1
    parents[2] = -1  # a pad
    return rows, None, parents, order


def path_to(parents, request, node):
    """Return the nodes from a root to a node."""
    if parents is None:
        return list(range(node + 1))
    path = [node]
    while parents[request, path[0]] >= 0:
        path.insert(0, int(parents[request, path[0]]))
    return path


def tokens_of(case, request, node):
    """Return the rows of the batch on the path to a node."""
    begin = request * case.nodes if case.begins is None else int(case.begins[request])
    return [begin + other for other in path_to(case.parents, request, node)]


def ends(case):
    """Yield each request, its row, its nodes and the row of each in the batch."""
    for request, row in enumerate(case.rows.tolist()):
        count = case.nodes if case.begins is None else int(case.begins[request:][:2].diff())
        begin = request * case.nodes if case.begins is None else int(case.begins[request])
        yield request, row, [(node, begin + node) for node in range(count)]


def scan_case(kind, shape, nodes, seed=0, dtype=torch.float32, state_dtype=torch.float32):
    """Return the arguments of a scan, with strided inputs, and the poison of what it writes."""
    g, k = generator_of(seed), KINDS[kind]
    rows, begins, parents, order = places(g, shape, nodes)
    count = 4 * nodes if begins is None else int(begins[-1])

    def random(*sizes, to=torch.float32):
        return torch.randn(sizes, generator=g).to(to)

    sides = (k.values, k.keys) if k.transposed else (k.keys, k.values)
    decays = {"head": 1, "key": k.keys, "value": k.values}[k.decay]
    shape_of_decay = (k.heads,) if k.decay == "head" else (k.heads, decays)
    mixed = random(count, k.groups * k.keys * 2 + k.heads * k.values, to=dtype)
    query, key, value = mixed.split([k.groups * k.keys] * 2 + [k.heads * k.values], 1)
    states = random(2 * ROWS, k.heads, *sides).to(state_dtype)
    states[:2] = 0
    pending = torch.zeros(ROWS, WIDTH + 2, dtype=torch.int64)
    pending[1:, 0] = torch.randint(0, 2, (ROWS - 1,), generator=g)
    logs = random(count, *shape_of_decay)
    given = {
        "query": query.unflatten(1, (k.groups, -1)),
        "key": key.unflatten(1, (k.groups, -1)) * (1 if k.delta else 0.3),
        "value": value.unflatten(1, (k.heads, -1)),
        "decay": logs if k.steps else -logs.abs(),
        "beta": random(count, k.heads).sigmoid() if k.delta else None,
    }  # fmt: skip
    options = {"scale": k.keys**-0.5, "normalise": k.delta, "transposed": k.transposed}
    weight = None
    if k.steps:
        weight = -random(k.heads, *sides).abs() if k.decay == "value" else -random(k.heads).abs()
        size = (k.heads, decays) if k.decay == "value" else (k.heads,)
        options |= {
            "decay_weight": weight, "decay_bias": random(*size), "skip": random(*size),
            "least": 0.1, "most": 2.0,
            "gate": random(count, k.heads, k.values, to=dtype) if k.decay == "value" else None,
        }  # fmt: skip
    width = update_size(k.heads, k.groups, k.keys, k.values, decays)
    return SimpleNamespace(
        kind=k, rows=rows, begins=begins, parents=parents, order=order, nodes=nodes, given=given,
        options=options, states=states, decays=decays,
        updates=torch.full((ROWS, 2, WIDTH, width), POISON), pending=pending,
        kept_parents=torch.full((ROWS, 2, WIDTH), -1),
        kept_weight=torch.full_like(weight, POISON) if k.decay == "value" else None,
    )  # fmt: skip


def run_scan(run, case, **launch):
    options = {} if run is CPU or not launch else {"launch": launch}
    return run(
        linear_scan, case.states, case.updates, case.kept_parents, case.pending, case.kept_weight,
        case.rows, case.begins, case.parents, case.order, *case.given.values(), case.nodes,
        **case.options, **options,
    )  # fmt: skip


def run_commit(run, case, nodes):
    run(commit_scans, case.pending, case.kept_parents, case.rows, nodes)


def current(case):
    """Return the state of the current slot of each row."""
    return case.states[2 * torch.arange(ROWS) + case.pending[:, 0]]


def committed(run, case):
    """Return the committed state of each row, which an empty prompt writes."""
    empty = SimpleNamespace(**vars(case))
    empty.rows, empty.begins = torch.arange(ROWS), torch.zeros(ROWS + 1, dtype=torch.int64)
    empty.parents, empty.order, empty.nodes = None, None, 0
    empty.states, empty.kept_parents = case.states.clone(), case.kept_parents.clone()
    empty.given = {n: x if x is None else x[:0] for n, x in case.given.items()}
    empty.options = {n: x for n, x in case.options.items() if n not in ("gate", "starts")}
    before = current(case)
    run_scan(run, empty)
    assert torch.equal(current(empty), before), "the current slots are read only"
    return empty.states[2 * torch.arange(ROWS) + 1 - case.pending[:, 0]]


def wanted(case, states, request, row, tokens):
    """Return the state [H, K, V] after a path and the output of its end, in float64."""
    k, given, options = case.kind, case.given, case.options
    state = states[row].double()
    state = state.transpose(1, 2) if k.transposed else state
    repeat = k.heads // k.groups
    out = None
    for t in tokens:
        q, key = (given[name][t].double() for name in ("query", "key"))
        if options["normalise"]:
            q, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, key))
        q, key = (x.repeat_interleave(repeat, 0) for x in (q * options["scale"], key))
        value = given["value"][t].double()
        added, logs = value, given["decay"][t].double().view(k.heads, -1)
        if k.steps:
            bias = options["decay_bias"].double().view(k.heads, -1)
            steps = torch.nn.functional.softplus(logs + bias).clamp(0.1, 2.0)
            added = value * steps
            weight = options["decay_weight"].double()
            if k.decay == "value":
                decay = torch.exp(steps[:, None] * weight.transpose(1, 2))
            else:
                decay = torch.exp(steps * weight[:, None])[..., None]
        else:
            decay = logs.exp()[..., None]
        state = state * decay
        if k.delta:
            read = torch.einsum("hkv,hk->hv", state, key)
            added = given["beta"][t].double()[:, None] * (value - read)
        state = state + key[..., None] * added[:, None]
        out = torch.einsum("hkv,hk->hv", state, q)
        if k.steps:
            out = out + value * options["skip"].double().view(k.heads, -1)
            if options["gate"] is not None:
                out = out * torch.nn.functional.silu(options["gate"][t].double())
    return state.transpose(1, 2) if k.transposed else state, out


@pytest.mark.slow
@pytest.mark.sanitized
@by_case
@runs
def test_outputs_and_committed_states_are_those_of_each_path(run, kind, shape):
    for seed, dtype in product(range(2), (torch.float32, torch.bfloat16)):
        case = scan_case(kind, *shape, seed=seed, dtype=dtype)
        before = current(case)
        out = run_scan(run, case)
        assert torch.equal(run_scan(run, case), out), "a scan may run again"
        assert torch.equal(current(case), before), "the current slots are read only"
        live = {row for row in case.rows.tolist() if row}
        others = [row for row in range(ROWS) if row not in live | {0}]
        assert bool((case.updates[others] == POISON).all())
        g, chosen = generator_of(seed), torch.zeros_like(case.rows)
        if case.begins is None:
            chosen = torch.randint(0, case.nodes, case.rows.shape, generator=g)
        run_commit(run, case, chosen)
        after = committed(run, case)
        exact = 2e-5 if dtype == torch.float32 else 2e-2
        for request, row, rows in ends(case):
            for node, token in rows:
                _, result = wanted(case, before, request, row, tokens_of(case, request, node))
                torch.testing.assert_close(out[token].double(), result, rtol=exact, atol=exact)
            last = int(chosen[request]) if case.begins is None else len(rows) - 1
            tokens = tokens_of(case, request, last) if rows else []
            state, _ = wanted(case, before, request, row, tokens)
            state = state if row else torch.zeros_like(before[0]).double()
            in_chunks = shape[0] == "prompt" and dtype != torch.float32 and case.decays == 1
            near = exact if in_chunks and run is not CPU else 2e-5
            stored = after[row].double()
            torch.testing.assert_close(stored, state.view_as(stored), rtol=near, atol=near)
        assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@runs
def test_a_node_has_the_bits_of_steps_of_one_node(run, kind, state_dtype):
    """Trees, chains, prompts and single steps give the same outputs and states, bit for bit."""
    for shape in [("chain", WIDTH), ("tree", WIDTH), ("prompt", 6)]:
        case = scan_case(kind, *shape, seed=3, dtype=torch.bfloat16, state_dtype=state_dtype)
        before = alone(case, 1)
        out = run_scan(run, case, in_chunks=False)
        last = torch.full_like(case.rows, 0 if case.begins is not None else case.nodes - 1)
        run_commit(run, case, last)
        after = committed(run, case)
        for request, row, rows in ends(case):
            if not row:
                continue
            for node, token in rows:
                single = alone(before, row)
                for t in tokens_of(case, request, node):
                    single.given = {
                        n: x if x is None else x[t : t + 1] for n, x in case.given.items()
                    }
                    if case.options.get("gate") is not None:
                        single.options["gate"] = case.options["gate"][t : t + 1]
                    result = run_scan(run, single)
                    run_commit(run, single, torch.zeros(1, dtype=torch.int64))
                assert torch.equal(result[0], out[token]), (shape, request, node)
            if rows:
                assert torch.equal(committed(run, single)[row], after[row]), shape


@pytest.mark.sanitized
@pytest.mark.parametrize("kind", ["gated delta rule", "delta rule of odd sizes", "Mamba 2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@runs
def test_chunks_are_those_of_positions(run, kind, dtype):
    """Prompts that are cut at multiples of 64 have equal bits, and at others nearly."""
    length, row = 150, 4
    case = scan_case(kind, "prompt", 0, seed=6, dtype=dtype)
    case.rows, case.nodes, case.begins = torch.tensor([row]), length, torch.tensor([0, length])
    made = scan_case(kind, "chain", WIDTH, seed=6, dtype=dtype)
    repeats = -(-length // (4 * WIDTH))
    given = {
        name: x if x is None else torch.cat([x * 0.9**n for n in range(repeats)])[:length]
        for name, x in made.given.items()
    }
    exact = 2e-4 if dtype == torch.float32 and run is not CUDA else 3e-2
    outs = []
    for cuts in ((0, 150), (0, 64, 150), (0, 128, 150), (0, 30, 70, 150)):
        part = SimpleNamespace(**vars(case))
        part.states, part.options = case.states.clone(), dict(case.options)
        part.pending, part.kept_parents = case.pending.clone(), case.kept_parents.clone()
        results = []
        for begin, end in pairwise(cuts):
            part.given = {n: x if x is None else x[begin:end] for n, x in given.items()}
            part.begins, part.nodes = torch.tensor([0, end - begin]), end - begin
            part.options["starts"] = torch.tensor([begin])
            results.append(run_scan(run, part, in_chunks=True))
            run_commit(run, part, torch.tensor([0]))
        outs.append((torch.cat(results), current(part)[row]))
    case.given = given
    state, last = wanted(case, current(case), 0, row, range(length))
    for number, (out, end) in enumerate(outs):
        torch.testing.assert_close(out[-1].double(), last, rtol=exact, atol=exact)
        torch.testing.assert_close(end.double(), state, rtol=exact, atol=exact)
        if number < 3:
            assert torch.equal(out, outs[0][0])
            assert torch.equal(end, outs[0][1])


def alone(case, row):
    """Return a case of one request with one node, on copies of what ops write."""
    copies = {name: each.clone() for name, each in vars(case).items() if torch.is_tensor(each)}
    made = SimpleNamespace(**{**vars(case), **copies})
    made.rows, made.begins, made.parents, made.order = torch.tensor([row]), None, None, None
    made.nodes, made.options = 1, dict(case.options)
    return made


@runs
def test_prompts_in_any_parts_have_the_same_bits(run):
    case = scan_case("gated delta rule", "prompt", 9, seed=5)
    case.rows, case.begins = torch.tensor([3]), torch.tensor([0, 9])
    case.given = {n: x if x is None else x[:9] for n, x in case.given.items()}
    assert all(x is None or len(x) == 9 for x in case.given.values())
    whole, parts = alone(case, 3), alone(case, 3)
    whole.begins, whole.nodes = case.begins, 9
    out, results = run_scan(run, whole, in_chunks=False), []
    run_commit(run, whole, torch.tensor([0]))
    for begin, end in ((0, 2), (2, 7), (7, 9)):
        parts.given = {n: x if x is None else x[begin:end] for n, x in case.given.items()}
        parts.begins, parts.nodes = torch.tensor([0, end - begin]), end - begin
        results.append(run_scan(run, parts, in_chunks=False))
        run_commit(run, parts, torch.tensor([WIDTH - 1]))
    assert torch.equal(torch.cat(results), out)
    assert torch.equal(current(parts)[3], current(whole)[3])


@pytest.mark.sanitized
@pytest.mark.parametrize("shape", [*STEPS, ("prompt", 1), ("prompt", 9)], ids=str)
@pytest.mark.parametrize(("columns", "taps"), [(3, 4), (2, 3), (4, 4)])
@runs
def test_convolutions_read_the_path_to_each_node(run, shape, columns, taps):
    channels = 70
    for seed, dtype in product(range(2), (torch.float32, torch.bfloat16)):
        g = generator_of(seed)
        rows, begins, parents, _ = places(g, *shape)
        case = SimpleNamespace(rows=rows, begins=begins, parents=parents, nodes=shape[1])
        count = 4 * case.nodes if begins is None else int(begins[-1])
        x = torch.randn(channels, count, generator=g).to(dtype).t()  # columns may be spaced
        weight = torch.randn(channels, taps, generator=g).to(dtype)
        bias = torch.randn(channels, generator=g).to(dtype) if seed else None
        states = torch.randn(ROWS * (WIDTH + 1), channels, columns, generator=g).to(dtype)
        before = states.clone()
        chosen, spread = None, x
        if seed:  # the channels are some columns of wider rows
            chosen = torch.randperm(channels + 9, generator=g)[:channels]
            spread = torch.full((count, channels + 9), POISON, dtype=dtype)
            spread[:, chosen] = x
        out = run(
            causal_conv, states, rows, begins, parents, spread, weight, bias, case.nodes, WIDTH,
            silu=bool(seed), columns=chosen,
        )  # fmt: skip
        exact = 1e-5 if dtype == torch.float32 else 3e-2
        written = set()
        for request, row, nodes in ends(case):
            for node, token in nodes:
                line = torch.cat(
                    [before[row * (WIDTH + 1)], x[tokens_of(case, request, node)].t()], 1
                )
                value = (line[:, -taps:].double() * weight.double()).sum(1)
                value = value if bias is None else value + bias.double()
                value = torch.nn.functional.silu(value) if seed else value
                torch.testing.assert_close(out[token].double(), value, rtol=exact, atol=exact)
                if begins is None:
                    slot = row * (WIDTH + 1) + 1 + node
                    written.add(slot)
                    assert row == 0 or torch.equal(states[slot], line[:, -columns:])
            if begins is not None:
                line = torch.cat([before[row * (WIDTH + 1)], x[[t for _, t in nodes]].t()], 1)
                for slot in range(row * (WIDTH + 1) + 1, (row + 1) * (WIDTH + 1)):
                    written.add(slot)
                    assert row == 0 or torch.equal(states[slot], line[:, -columns:])
        kept = [slot for slot in range(len(states)) if slot not in written]
        assert torch.equal(states[kept], before[kept])


@pytest.mark.parametrize("in_chunks", [False, True], ids=["rows", "chunks"])
@pytest.mark.parametrize("kind", ["gated delta rule", "Mamba 2", "Mamba"])
@runs
def test_rows_behind_the_last_prompt_are_zeros(run, kind, in_chunks):
    """They change neither the other rows nor the states, and requests may have no rows."""
    results = []
    for pads in (0, 70):
        case = scan_case(kind, "prompt", 9, seed=11)
        count = int(case.begins[-1])
        rows = torch.cat([case.rows, torch.zeros(2, dtype=torch.int64)])
        case.rows, case.begins = rows, torch.cat([case.begins, case.begins[-1:].expand(2)])
        case.nodes = count + pads

        def padded(x, pads=pads):
            return x if x is None else torch.cat([x, x.new_full((pads, *x.shape[1:]), POISON)])

        case.given = {name: padded(x) for name, x in case.given.items()}
        if case.options.get("gate") is not None:
            case.options["gate"] = padded(case.options["gate"])
        out = run_scan(run, case, in_chunks=in_chunks)
        run_commit(run, case, torch.zeros_like(rows))
        states, x = torch.zeros(ROWS * (WIDTH + 1), 7, 3), case.given["value"].flatten(1)[:, :7]
        weight = torch.arange(28.0).view(7, 4)
        mixed = run(
            causal_conv, states, rows, case.begins, None, x, weight, None, case.nodes, WIDTH
        )
        assert bool((out[count:] == 0).all())
        assert bool((mixed[count:] == 0).all())
        results.append((out[:count], mixed[:count], states[WIDTH + 1 :], current(case)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@runs
def test_gates_are_computed_from_any_columns(run):
    """Time steps and betas before their functions, in columns of wider rows, give the same."""
    plain = scan_case("gated delta rule", "tree", WIDTH, seed=7)
    spread = scan_case("gated delta rule", "tree", WIDTH, seed=7)
    g = generator_of(8)
    steps, betas = (torch.randn(4 * WIDTH, 4, generator=g) for _ in range(2))
    weight, bias = (torch.randn(4, generator=g) for _ in range(2))
    plain.given["decay"] = -weight.exp() * torch.nn.functional.softplus(steps + bias)
    plain.given["beta"] = 2 * betas.sigmoid()
    columns = torch.randperm(11, generator=g)
    rows = torch.full((4 * WIDTH, 11), POISON)
    rows[:, columns[:4]], rows[:, columns[4:8]] = steps, betas
    spread.given |= {"decay": rows, "beta": rows}
    spread.options |= {
        "decay_weight": weight, "decay_bias": bias, "log_weight": True, "beta_scale": 2.0,
        "decay_columns": columns[:4], "beta_columns": columns[4:8],
    }  # fmt: skip
    torch.testing.assert_close(run_scan(run, spread), run_scan(run, plain), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(spread.updates, plain.updates, rtol=2e-5, atol=2e-5)
    nodes = torch.tensor([4, 2, 0, 1])
    for case in (plain, spread):
        run_commit(run, case, nodes)
    one, other = committed(run, spread), committed(run, plain)
    torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


class TestRefusals:
    def test_more_nodes_than_are_kept(self):
        case = scan_case("KDA", "chain", WIDTH)
        case.updates, case.kept_parents, case.pending = (
            case.updates[:, :, 1:].clone(),
            case.kept_parents[:, :, 1:].clone(),
            case.pending[:, 1:].clone(),
        )
        with pytest.raises(AttentionError, match="nodes is 5, but the states of 4 are kept"):
            run_scan(CPU, case)

    def test_decays_of_another_kind(self):
        case = scan_case("KDA", "chain", 2)
        case.given["decay"] = case.given["decay"][..., :3]
        with pytest.raises(AttentionError, match="decay is"):
            run_scan(CPU, case)

    def test_a_node_that_is_not_kept(self):
        case = scan_case("KDA", "chain", 2)
        run_scan(CPU, case)
        with pytest.raises(AttentionError, match="a row or node is 9"):
            run_commit(CPU, case, torch.tensor([0, 9, 0, 0]))
