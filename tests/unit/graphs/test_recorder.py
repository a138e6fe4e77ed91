"""The recorder freezes what a CUDA graph freezes and refuses what a capture refuses."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from graphkit.errors import CaptureCause, ConfigError, InputError, ReplayError
from graphkit.graphs import Attribution, CaptureFailure, RecorderBackend, backend_for
from graphkit.ops.tree_walk import pick

SYNC, SHAPE = CaptureCause.HOST_SYNCHRONISATION, CaptureCause.DATA_DEPENDENT_SHAPE
ROWS = torch.tensor([2, 0, 1])


@torch.library.custom_op("graphkit_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * sum(x.flatten().tolist()) + x.sum().item()  # allowed inside an operation


@torch.library.custom_op("graphkit_tests::tiled", mutates_args=())
def tiled(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=True).expand(3, 3)  # all rows share memory


@torch.library.custom_op("graphkit_tests::shift_", mutates_args=("x",))
def shift_(x: torch.Tensor, by: float) -> None:
    x += by


@torch.library.custom_op("graphkit_tests::first_column", mutates_args=())
def first_column(x: torch.Tensor) -> torch.Tensor:
    return x.t_()[0].clone()  # changes the shape of its argument


class Block(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Block(depth - 1) if depth else nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        return x + self.inner(self.norm(x)).relu()


def on_copy(change):
    """A function that applies an in-place change to a copy and returns the copy."""

    def function(x):
        y = x.clone()
        change(y)
        return y

    return function


def under(context, function):
    def inner(x):
        with context:
            return function(x)

    return inner


BLOCK, LSTM = Block(3), nn.LSTM(3, 4)
REPLAYED = {
    "arithmetic": lambda x: (x * 2 + 1).relu(),
    "in place": on_copy(lambda y: y.add_(1).mul_(y)),
    "in place on a view": on_copy(lambda y: y[1:].t().neg_()),
    "slice assignment": on_copy(lambda y: y.__setitem__((slice(1, 3), 0), y[0, :2])),
    "index_put_": on_copy(lambda y: y.index_put_((ROWS,), y * 3)),
    "accumulating index_put_": on_copy(lambda y: y.index_put_((ROWS % 2,), y * 2, accumulate=True)),
    "integer index": lambda x: x[ROWS],
    "views alone": lambda x: (x.view(9)[2:7], x.t(), x[1].expand(4, 3)),
    "view of a result": lambda x: (x + 1).t()[:2],
    "out=": lambda x: torch.add(x, x, out=torch.empty(3, 3)),
    "two outs": lambda x: torch.max(x, 1, out=(torch.empty(3), torch.empty(3, dtype=torch.long))),
    "several results": lambda x: [*x.sort(1), *x.topk(2), *torch.linalg.svd(x), *x.unbind()],
    "lists of tensors": lambda x: torch._foreach_add([x, x * 2], 1),
    "attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "nested modules": BLOCK,
    "batch statistics": nn.BatchNorm1d(3),
    "where": lambda x: torch.where(x > 0, x, -x).cumsum(0),
    "repeats of known size": lambda x: x.repeat_interleave(ROWS, dim=0, output_size=3),
    "constants": lambda x: x + torch.arange(3) + torch.zeros(3, 3).fill_(2),
    "custom op": scaled,
    "op whose rows share memory": lambda x: tiled(x) + 1,
    "op with more results under grad": lambda x: LSTM(x[None])[0],
    "a number behind a mask": on_copy(lambda y: y.__setitem__(y > 0, 0.5)),
    "a number behind a mask of columns": on_copy(
        lambda y: y.__setitem__((slice(1, 3), y[0] > 0), -1)
    ),
    "custom op in place": on_copy(lambda y: shift_(y, 1.5)),
    "custom op that transposes its argument": lambda x: first_column(x[:2] + 1),
    "transposed in place": lambda x: (x[:2] + 1).t_() * 2,
    "squeezed in place": lambda x: x.sum(0, keepdim=True).squeeze_(0) + 1,
    "unsqueezed in place": lambda x: (x + 1).unsqueeze_(0),
    "op that squeezes internally": lambda x: torch.quantile(x, 0.5, dim=0),
    "autocast": under(torch.autocast("cpu", torch.bfloat16), lambda x: x @ x.t() + 1),
    "no_grad": under(torch.no_grad(), BLOCK),
    "inference_mode": torch.inference_mode()(lambda x: BLOCK(x).relu_().t()[:2]),
}


def capture(function):
    backend = RecorderBackend()
    with backend.session():
        return backend.capture(function)


@pytest.mark.parametrize("function", REPLAYED.values(), ids=REPLAYED)
def test_a_replay_equals_eager_on_new_values_at_the_same_addresses(function):
    torch.manual_seed(0)
    x = torch.randn(3, 3)
    graph = capture(lambda: function(x))
    before = [(t.data_ptr(), t.shape, t.stride()) for t in tree_leaves(graph.output)]
    for _ in range(3):
        x.copy_(torch.randn(3, 3))
        graph.replay()
        expected = function(x.clone())
        torch.testing.assert_close(graph.output, expected, rtol=0, atol=0)
        assert [(t.data_ptr(), t.shape, t.stride()) for t in tree_leaves(graph.output)] == before


def test_a_replay_does_not_depend_on_autocast_or_grad_mode():
    x = torch.randn(3, 3)
    graph = capture(lambda: x @ x.t())
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        graph.replay()
    assert torch.equal(graph.output, x @ x.t())


def test_a_compiled_function_is_recorded_eagerly_and_stays_compiled():
    runs = []

    def backend(graph, _inputs):
        def compiled(*args):
            runs.append(args)
            return graph.forward(*args)

        return compiled

    torch._dynamo.reset()
    function = torch.compile(lambda x: (x + 1).relu(), backend=backend)
    function(X)
    assert len(runs) == 1
    for refused in (False, True):
        with suppress(CaptureFailure):
            names = [op.op.name() for op in capture(lambda r=refused: read(function(X), r)).ops]
        assert names == ["aten::add.Tensor", "aten::relu"]
        assert len(runs) == 1 + refused, "the capture ran it eagerly"
        function(X)
        assert len(runs) == 2 + refused, "compiled after the capture"


def read(x, refused):
    return x.sum().item() if refused else x


def test_python_does_not_run_again_and_host_values_are_frozen():
    x, host = torch.ones(2), {"scale": 2.0, "calls": 0}

    def step():
        host["calls"] += 1
        return x * host["scale"] * host["calls"]

    graph = capture(step)
    host["scale"] = 100.0
    graph.replay()
    assert host["calls"] == 1
    assert graph.output.tolist() == [2.0, 2.0]


def test_a_replay_changes_outside_state_once():
    cache, x = torch.zeros(4), torch.ones(2)
    graph = capture(lambda: cache.index_add_(0, torch.tensor([1, 3]), x))
    for _ in range(3):
        graph.replay()
    assert cache.tolist() == [0, 4, 0, 4], "the capture itself runs once"


def test_a_replay_leaves_uninitialised_memory_as_it_is():
    """A CUDA graph has no node for it, so kept memory keeps what the host or a replay wrote."""
    x, kept = torch.ones(3), {}

    def step():
        kept["memory"] = torch.empty(3)
        return x + kept["memory"]

    graph = capture(step)
    for number in (1.0, 2.0):
        kept["memory"].fill_(number)
        graph.replay()
        assert graph.output.tolist() == [1 + number] * 3
    assert graph.num_nodes == 2


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(5),
        lambda x: torch.randn_like(x) + torch.randint(0, 9, (3, 3)),
        lambda x: x.clone().normal_().bernoulli_(0.5),
        lambda x: functional.dropout(x, 0.5) + nn.Dropout(0.25)(x),
        lambda x: x.abs().multinomial(2),
        lambda x: torch.randperm(7),
    ],
)
def test_random_numbers_advance_as_in_eager(draw):
    x = torch.randn(3, 3)
    torch.manual_seed(5)
    expected, states = [], []
    for _ in range(3):
        expected.append(draw(x))
        states.append(torch.get_rng_state())
    torch.manual_seed(5)
    graph = capture(lambda: draw(x))
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(5).get_state())
    for value, state in zip(expected, states, strict=True):
        graph.replay()
        assert torch.equal(graph.output, value)
        assert torch.equal(torch.get_rng_state(), state)


X, MASK, ONE = torch.arange(6.0), torch.arange(6) > 2, torch.tensor(1.0)
GRID = torch.eye(3)
REFUSED = [
    (lambda: X.sum().item(), SYNC, "aten::_local_scalar_dense"),
    (lambda: X[: MASK.sum()], SYNC, "aten::_local_scalar_dense"),
    (lambda: torch.equal(X, X), SYNC, "aten::equal"),
    (lambda: X.tolist(), SYNC, "Tensor.tolist"),
    (lambda: X.numpy(), SYNC, "Tensor.numpy"),
    (lambda: np.asarray(X), SYNC, "Tensor.__array__"),
    (lambda: X.cpu(), SYNC, "Tensor.cpu"),
    (lambda: f"{X}", SYNC, "Tensor."),
    (lambda: X.nonzero(), SHAPE, "aten::nonzero"),
    (lambda: X[MASK], SHAPE, "aten::index"),
    (lambda: X.index_put_((MASK,), X[3:]), SHAPE, "aten::index_put_"),
    (lambda: X.__setitem__(MASK, X[3:]), SHAPE, "Tensor.__setitem__"),
    (lambda: X.__setitem__(MASK, X[0]), SHAPE, "Tensor.__setitem__"),
    (lambda: X.index_put_((MASK,), ONE, accumulate=True), SHAPE, "aten::index_put_"),
    (lambda: GRID.__setitem__((GRID[0] > 0, GRID[0] > 0), 0), SHAPE, "aten::index_put_"),
    (lambda: X.unique(), SHAPE, "aten::_unique2"),
    (lambda: X.repeat_interleave(X.long()), SHAPE, "aten::repeat_interleave"),
]


def failure_of(function):
    before = torch.get_rng_state()
    with pytest.raises(CaptureFailure) as caught:
        capture(function)
    assert torch.equal(torch.get_rng_state(), before)
    return caught.value


@pytest.mark.parametrize(("function", "cause", "what"), REFUSED)
def test_a_refused_operation_has_its_cause_and_line(function, cause, what):
    before = X.clone()
    failure = failure_of(lambda: (torch.rand(3), function()))
    line = inspect.getsourcelines(function)[1]
    assert failure.cause is cause
    assert failure.where.startswith(what)
    assert f" at {__file__}:{line} `" in failure.where
    assert "\n" not in failure.where
    assert torch.equal(X, before), "the operation did not run"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError, None])
def test_a_failure_leaves_no_trace(raised):
    def fails():
        y = torch.rand(3) + X[:3]
        if raised:
            raise raised("stop")
        return y.item()

    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt if raised is KeyboardInterrupt else CaptureFailure):
        capture(fails)
    assert torch.equal(torch.get_rng_state(), before)
    assert (X.sum().item(), X[MASK].tolist(), np.asarray(X)[1]) == (15, [3, 4, 5], 1)
    graph = capture(lambda: X + 1)
    assert graph.num_nodes == 1, "no operation of the failed attempt"


@pytest.mark.parametrize(
    ("function", "cause", "text"),
    [
        (lambda: 1 / 0, CaptureCause.FORWARD_ERROR, " raised ZeroDivisionError: division by zero"),
        (
            lambda: torch.ones(2) @ torch.ones(3),
            CaptureCause.FORWARD_ERROR,
            " raised RuntimeError: ",
        ),
        (
            lambda: lacks_a_kernel(),
            CaptureCause.UNSUPPORTED_OP,
            "(NotImplementedError: no kernel)",
        ),
        (lambda: torch.empty(1 << 50), CaptureCause.OUT_OF_MEMORY, "(RuntimeError: "),
    ],
)
@pytest.mark.parametrize("method", ["capture", "warm_up"])
def test_an_error_in_the_forward_has_its_cause_and_line(function, cause, text, method):
    with pytest.raises(CaptureFailure) as caught:
        getattr(RecorderBackend(), method)(function)
    assert caught.value.cause is cause
    assert caught.value.where.startswith(f"{__file__}:")
    assert text in caught.value.where
    assert caught.value.__cause__ is not None


def lacks_a_kernel():
    raise NotImplementedError("no kernel\nsecond line")


class Calls(nn.Module):
    """Calls a function in its forward."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


FAR = torch.tensor([300])


def test_an_error_in_graphkit_names_both_lines_and_the_module():
    model = nn.Sequential(nn.Identity(), Calls(lambda x: pick(x[None], FAR)))
    failure = failure_of(lambda: model(X))
    assert failure.cause is CaptureCause.GRAPHKIT_ERROR
    line = line_of("Calls(lambda x: pick")
    assert re.fullmatch(
        rf"{re.escape(__file__)}:{line} `model = .*` in module Sequential\.1 called graphkit, "
        r"which raised RuntimeError: index 300 is out of bounds .* at \S*tree_walk\.py:\d+ "
        r"`.*gather.*`",
        failure.where,
    )


def test_an_error_in_graphkit_without_a_user_line_names_its_own():
    failure = failure_of(partial(pick, X[None], FAR))
    assert failure.cause is CaptureCause.GRAPHKIT_ERROR
    text = r"graphkit raised RuntimeError: index 300 is out .* at \S*tree_walk\.py:\d+ `.*`"
    assert re.fullmatch(text, failure.where)


def refuses(x):
    raise InputError("field 'positions' is missing.", field="positions")


@pytest.mark.parametrize("function", [refuses, Calls(refuses)])
def test_a_graphkit_error_in_the_forward_keeps_its_message(function):
    failure = failure_of(lambda: function(X))
    assert failure.cause is CaptureCause.FORWARD_ERROR
    assert failure.where.startswith(f"{__file__}:{line_of('raise InputError')} `raise InputError")
    assert failure.where.endswith(" raised InputError: field 'positions' is missing")
    assert (" in module Calls raised" in failure.where) == isinstance(function, nn.Module)


def test_a_refused_operation_names_its_module():
    model = nn.Sequential(Calls(lambda x: x.sum().item()))
    assert failure_of(lambda: model(X)).where.endswith("` in module Sequential.0")


@pytest.mark.parametrize("folder", ["vision", "tune_recipes"])
def test_a_package_whose_name_begins_with_torch_is_user_code(folder):
    path = f"{Path(torch.__file__).parent}{folder}/model.py"
    space: dict[str, object] = {}
    exec(compile("def forward(x):\n    return x.sum().item()", path, "exec"), space)
    assert f" at {path}:2 " in failure_of(lambda: space["forward"](X)).where


def test_memory_counts_each_storage_once():
    graph = capture(lambda: (X + 1).mul_(2).view(2, 3).t())
    assert (graph.num_nodes, graph.pool_bytes) == (2, 6 * 4)
    graph.close()
    assert graph.output is None


def test_the_cpu_gets_the_recorder():
    assert isinstance(backend_for("cpu"), RecorderBackend)
    assert backend_for("cpu", shared := RecorderBackend()) is shared


@pytest.mark.parametrize("device", ["nonsense", "meta", "mps"])
def test_an_unsupported_device_is_a_config_error(device):
    with pytest.raises(ConfigError, match=device):
        backend_for(device)


def test_a_closed_graph_cannot_be_replayed():
    graph = capture(lambda: ROWS + 1)
    graph.close()
    for run in (graph.replay, graph.run):
        with pytest.raises(ReplayError, match="the graph is closed"):
            run()


def test_an_operation_that_fails_in_a_replay_is_named_with_its_line():
    rows = ROWS.clone()
    backend, attribution = RecorderBackend(), Attribution()
    graph = backend.capture(lambda: (rows + 0)[rows], attribution)
    rows.fill_(3)
    text = (
        r"node 1, `aten::index.Tensor` \(\S*test_recorder.py:\d+ .*\), raised IndexError: index 3"
    )
    with pytest.raises(ReplayError, match=text) as caught:
        graph.replay()
    assert isinstance(caught.value.__cause__, IndexError)
    rows.copy_(ROWS)
    graph.replay()
    assert graph.output.tolist() == ROWS[ROWS].tolist()
