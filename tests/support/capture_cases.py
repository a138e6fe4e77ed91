"""What graphs do on CUDA, for the tests that import this file: the recorder agrees with it.

``CASES`` says whether a capture takes an operation, ``REPLAYS`` what several graphs of a backend
compute. ``tests/gpu/test_capture_rules.py`` proves both tables on CUDA.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from graphkit.errors import CaptureCause
from graphkit.graphs import Backend

SYNC, SHAPE = CaptureCause.HOST_SYNCHRONISATION, CaptureCause.DATA_DEPENDENT_SHAPE
UNSUPPORTED = CaptureCause.UNSUPPORTED_OP


class Case(NamedTuple):
    """One operation on the tensors of ``make_inputs``.

    ``cause`` is ``None`` if a capture takes it, ``differs`` says how the CPU's operation differs.
    """

    name: str
    function: Callable[[SimpleNamespace], Any]
    cause: CaptureCause | None = None
    differs: str = ""


@torch.library.custom_op("graphkit_capture_cases::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("graphkit_capture_cases::add_one_", mutates_args=("x",))
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("graphkit_capture_cases::first_value", mutates_args=())
def first_value(x: torch.Tensor) -> torch.Tensor:
    return x + x[0, 0].item()


def make_inputs(device: torch.device | str) -> SimpleNamespace:
    device = torch.device(device)
    return SimpleNamespace(
        device=device,
        x=torch.arange(16.0, device=device).view(4, 4) / 16 + torch.eye(4, device=device),
        v=torch.arange(6.0, device=device),
        ids=torch.tensor([2, 0, 1], device=device),
        mask=torch.tensor([True, False, True, False], device=device),
        one=torch.ones((), device=device),
        groups=torch.tensor([16, 32], dtype=torch.int32, device=device),
        rows=torch.ones(32, 16, device=device),
        experts=torch.ones(2, 16, 16, device=device),
        generator=torch.Generator(device),
        default_generator=(
            torch.cuda.default_generators[torch.cuda.current_device()]
            if device.type == "cuda"
            else torch.default_generator
        ),
        pinned=torch.ones(4, 4, pin_memory=device.type == "cuda"),
        layer=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, device=device).eval(),
    )


def encoded(t: SimpleNamespace, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Run an encoder layer on its fast path."""
    with torch.no_grad():
        return t.layer(t.x[None], src_key_padding_mask=mask)


def attended(t: SimpleNamespace) -> torch.Tensor:
    """Run attention on its fast path."""
    with torch.no_grad():
        return t.layer.self_attn(*[t.x[None]] * 3, need_weights=False)[0]


def grouped(t: SimpleNamespace, dtype: torch.dtype) -> torch.Tensor:
    return functional.grouped_mm(t.rows.to(dtype), t.experts.to(dtype), offs=t.groups)


def assign(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    tensor[index] = value
    return tensor


NO_DEVICE = "the device is the host as well: no copy is dispatched"
CPU_SYNC = "the CPU kernel reads the values, the CUDA kernel does not"
CUDA_SYNC = "the CUDA kernel reads values on the host, the CPU kernel shows no such read"
NO_GENERATOR = "the CPU draws from any generator"

READS = [
    Case("item", lambda t: t.one.item(), SYNC),
    Case("float", lambda t: float(t.one), SYNC),
    Case("int", lambda t: int(t.ids[0]), SYNC),
    Case("bool", lambda t: bool(t.mask.any()), SYNC),
    Case("if", lambda t: 1 if t.v.sum() > 0 else 0, SYNC),
    Case("is_nonzero", lambda t: t.one.is_nonzero(), SYNC),
    Case("range of a tensor", lambda t: list(range(t.ids[0])), SYNC),
    Case("tensor as index", lambda t: t.v[t.ids[0]], SYNC),
    Case("tensor as slice bound", lambda t: t.v[: t.ids[0]], SYNC),
    Case("builtin max", lambda t: max(t.v), SYNC),
    Case("in", lambda t: 3.0 in t.v, SYNC),
    Case("equal", lambda t: torch.equal(t.x, t.x + 1), SYNC),
    Case("allclose", lambda t: torch.allclose(t.x, t.x), SYNC),
    Case("arange up to a tensor", lambda t: torch.arange(t.ids[0], device=t.device), SYNC),
    Case("full of a tensor", lambda t: torch.full((2,), t.one, device=t.device), SYNC),
    Case("tolist", lambda t: t.ids.tolist(), SYNC, NO_DEVICE),
    Case("cpu", lambda t: t.x.cpu(), SYNC, NO_DEVICE),
    Case("cpu().numpy()", lambda t: t.x.cpu().numpy(), SYNC, NO_DEVICE),
    Case('to("cpu")', lambda t: t.x.to("cpu"), SYNC, NO_DEVICE),
    Case('to(device="cpu")', lambda t: t.x.to(device="cpu"), SYNC, NO_DEVICE),
    Case('to(torch.device("cpu"))', lambda t: t.x.to(torch.device("cpu")), SYNC, NO_DEVICE),
    Case('to("cpu", dtype)', lambda t: t.x.to("cpu", torch.float64), SYNC, NO_DEVICE),
    Case(
        "copy_ to the host", lambda t: torch.empty(4, 4, device="cpu").copy_(t.x), SYNC, NO_DEVICE
    ),
    Case("print", lambda t: print(t.x, file=io.StringIO()), SYNC, NO_DEVICE),
    Case("repr", lambda t: repr(t.x), SYNC, NO_DEVICE),
    Case("format", lambda t: f"{t.one:.2f}", SYNC, NO_DEVICE),
    Case("str of a tensor", lambda t: f"{t.x}", SYNC, NO_DEVICE),
    Case("tensor of tensors", lambda t: torch.tensor([t.v[0], t.v[1]]), SYNC, NO_DEVICE),
    Case("histc without a range", lambda t: torch.histc(t.v, 4), SYNC, CUDA_SYNC),
    Case("grouped_mm float32", lambda t: grouped(t, torch.float32), SYNC, CUDA_SYNC),
    Case(
        "linspace to a tensor",
        lambda t: torch.linspace(0, t.one, 4, device=t.device),
        SYNC,
        CUDA_SYNC,
    ),
    Case("linalg.solve", lambda t: torch.linalg.solve(t.x, t.x), SYNC, CUDA_SYNC),
    Case("linalg.inv", lambda t: torch.linalg.inv(t.x), SYNC, CUDA_SYNC),
    Case("linalg.cholesky", lambda t: torch.linalg.cholesky(t.x @ t.x.mT), SYNC, CUDA_SYNC),
]
SHAPES = [
    Case("nonzero", lambda t: t.x.nonzero(), SHAPE),
    Case("argwhere", lambda t: torch.argwhere(t.x), SHAPE),
    Case("where of one argument", lambda t: torch.where(t.mask), SHAPE),
    Case("masked_select", lambda t: t.x.masked_select(t.x > 0), SHAPE),
    Case("boolean index", lambda t: t.x[t.mask], SHAPE),
    Case("boolean index of columns", lambda t: t.x[:, t.mask], SHAPE),
    Case("tensor behind a mask", lambda t: assign(t.x, t.mask, t.x[:2] * 2), SHAPE),
    Case("scalar tensor behind a mask", lambda t: assign(t.x, t.mask, t.one), SHAPE),
    Case("index_put_ behind a mask", lambda t: t.x.index_put_((t.mask,), t.x[:2] * 2), SHAPE),
    Case("unique", lambda t: t.v.unique(), SHAPE),
    Case("unique of rows", lambda t: torch.unique(t.x, dim=0), SHAPE),
    Case("unique_consecutive", lambda t: t.v.unique_consecutive(), SHAPE),
    Case("bincount", lambda t: t.ids.bincount(), SHAPE),
    Case("bincount with minlength", lambda t: t.ids.bincount(minlength=4), SHAPE),
    Case("repeat_interleave of tensors", lambda t: t.v[:3].repeat_interleave(t.ids), SHAPE),
    Case("combinations", lambda t: torch.combinations(t.v), SHAPE),
    Case("to_sparse", lambda t: t.x.to_sparse(), SHAPE),
    Case("one_hot without num_classes", lambda t: functional.one_hot(t.ids), SYNC),
]
UPLOADS = [
    Case("tensor(list, device)", lambda t: torch.tensor([1, 2], device=t.device), SYNC, NO_DEVICE),
    Case("tensor(array, device)", lambda t: torch.tensor(np.ones(2), device=t.device), SYNC,
         NO_DEVICE),
    Case("tensor(list).to(device)", lambda t: torch.tensor([1.0, 2.0]).to(t.device), SYNC,
         NO_DEVICE),
    Case("tensor(list).to(tensor)", lambda t: torch.tensor([1.0, 2.0]).to(t.x), SYNC, NO_DEVICE),
    Case("result of host tensors .to(device)",
         lambda t: (torch.tensor([1.0, 2.0])[:1] + 1).to(t.device), SYNC, NO_DEVICE),
    Case("tensor(list).to(non_blocking)",
         lambda t: torch.tensor([1.0, 2.0]).to(t.device, non_blocking=True), SYNC, NO_DEVICE),
    Case('zeros(device="cpu").to(device)', lambda t: torch.zeros(2, device="cpu").to(t.device),
         SYNC, NO_DEVICE),
    Case("as_tensor(list, device)", lambda t: torch.as_tensor([1, 2], device=t.device), SYNC,
         NO_DEVICE),
    Case("as_tensor(array, device)", lambda t: torch.as_tensor(np.ones(2), device=t.device), SYNC,
         NO_DEVICE),
    Case("as_tensor(array).to(device)", lambda t: torch.as_tensor(np.ones(2)).to(t.device), SYNC,
         NO_DEVICE),
    Case("asarray(list, device)", lambda t: torch.asarray([1, 2], device=t.device), SYNC,
         NO_DEVICE),
    Case("new_tensor", lambda t: t.x.new_tensor([1, 2]), SYNC, NO_DEVICE),
    Case("from_numpy().to(device)", lambda t: torch.from_numpy(np.ones(2)).to(t.device), SYNC,
         NO_DEVICE),
    Case("from_numpy().to(device, dtype)",
         lambda t: torch.from_numpy(np.ones(2)).to(t.device, torch.float32), SYNC, NO_DEVICE),
    Case("copy_ of a host tensor", lambda t: t.v[:2].copy_(torch.tensor([1.0, 2.0])), SYNC,
         NO_DEVICE),
    Case("copy_ that does not block",
         lambda t: t.v[:2].copy_(torch.tensor([1.0, 2.0]), non_blocking=True), SYNC, NO_DEVICE),
    Case("slice assignment of a host tensor",
         lambda t: assign(t.v, slice(0, 2), torch.tensor([1.0, 2.0])), SYNC, NO_DEVICE),
    Case("list as index", lambda t: t.x[[0, 2]], SYNC, NO_DEVICE),
    Case("list as index of columns", lambda t: t.x[:, [0, 2]], SYNC, NO_DEVICE),
    Case("array as index", lambda t: t.x[np.array([0, 2])], SYNC, NO_DEVICE),
    Case("host tensor as index", lambda t: t.x[torch.tensor([0, 2])], SYNC, NO_DEVICE),
    Case("list as index of an assignment", lambda t: assign(t.x, [0, 2], t.x[:2] * 2), SYNC,
         NO_DEVICE),
]  # fmt: skip
HOST = [
    Case("tensor(list)", lambda t: (t.x + 1, torch.tensor([1, 2]))[0]),
    Case("tensor(list).tolist()", lambda t: t.x + torch.tensor([1, 2]).tolist()[0]),
    Case("item of a host tensor", lambda t: t.x * torch.tensor([2.0, 3.0])[0].item()),
    Case("cpu() of a host tensor", lambda t: (t.x + 1, torch.tensor([1, 2]).cpu())[0]),
    Case('tensor(list, device="cpu")', lambda t: t.x + len(torch.tensor([1, 2], device="cpu"))),
    Case("host scalar times tensor", lambda t: t.x * torch.tensor(2.0)),
    Case("host scalar into a slice", lambda t: assign(t.v, slice(0, 2), torch.tensor(2.0))),
    Case("nonzero of a host tensor", lambda t: t.x + len(torch.tensor([1, 0]).nonzero())),
]
TAKEN = [
    Case("arithmetic", lambda t: (t.x * 2 + 1).relu()),
    Case("matmul", lambda t: t.x @ t.x.mT),
    Case("views", lambda t: (t.x + 1).view(16)[2:7].unsqueeze(0).expand(3, 5)),
    Case("in place", lambda t: t.x.add_(1).mul_(2)),
    Case("in place on a view", lambda t: t.x[1:].neg_()),
    Case("fill_", lambda t: t.x.fill_(3)),
    Case("slice assignment of a number", lambda t: assign(t.v, slice(0, 2), 3.0)),
    Case("slice assignment of a tensor", lambda t: assign(t.v, slice(0, 2), t.v[2:4])),
    Case("number behind a mask", lambda t: assign(t.x, t.x > 0.5, 0.0)),
    Case("masked_fill", lambda t: t.x.masked_fill(t.x > 0.5, 0.0)),
    Case("where of three arguments", lambda t: torch.where(t.x > 0.5, t.x, 0.0)),
    Case("integer index", lambda t: t.x[t.ids]),
    Case("integer index of two dimensions", lambda t: t.x[t.ids, t.ids]),
    Case("index_select", lambda t: t.x.index_select(0, t.ids)),
    Case("gather", lambda t: t.x.gather(0, t.ids[None])),
    Case("scatter", lambda t: t.x.scatter(0, t.ids[None], 1.0)),
    Case("scatter_add_", lambda t: t.x.scatter_add_(0, t.ids[None], t.x[:1].clone())),
    Case("index_put_", lambda t: t.x.index_put_((t.ids,), t.x[:3] * 2)),
    Case("accumulating index_put_",
         lambda t: t.x.index_put_((t.ids,), t.x[:3] * 2, accumulate=True)),
    Case("index_add_", lambda t: t.x.index_add_(0, t.ids, t.x[:3] * 2)),
    Case("index_copy_", lambda t: t.x.index_copy_(0, t.ids, t.x[:3] * 2)),
    Case("take_along_dim", lambda t: t.x[:, :3].take_along_dim(t.ids[None], 0)),
    Case("cumsum", lambda t: t.x.cumsum(1)),
    Case("sort", lambda t: t.x.sort(1)),
    Case("argsort", lambda t: t.v.argsort(descending=True)),
    Case("topk", lambda t: t.x.topk(2)),
    Case("max along a dimension", lambda t: t.x.max(1)),
    Case("argmax", lambda t: t.x.argmax(-1)),
    Case("softmax", lambda t: t.x.softmax(-1)),
    Case("logsumexp", lambda t: t.x.logsumexp(-1)),
    Case("any without bool", lambda t: (t.x > 0).any()),
    Case("isfinite", lambda t: t.x.isfinite().all()),
    Case("searchsorted", lambda t: torch.searchsorted(t.v, t.v)),
    Case("bucketize", lambda t: torch.bucketize(t.x, t.v)),
    Case("cat and stack", lambda t: torch.stack([torch.cat([t.v, t.v])] * 2)),
    Case("split", lambda t: torch.split(t.v + 1, [2, 4])),
    Case("unbind", lambda t: list(t.x + 1)),
    Case("histc with a range", lambda t: torch.histc(t.v, 4, 0, 6)),
    Case("repeat_interleave of a number", lambda t: t.v.repeat_interleave(2)),
    Case("repeat_interleave with output_size",
         lambda t: t.v[:3].repeat_interleave(t.ids, output_size=3)),
    Case("one_hot with num_classes", lambda t: functional.one_hot(t.ids, num_classes=4),
         differs=CPU_SYNC),
    Case("one_hot with positional num_classes", lambda t: functional.one_hot(t.ids, 4),
         differs=CPU_SYNC),
    Case("empty", lambda t: torch.empty(1024, device=t.device).fill_(1)),
    Case("zeros and arange", lambda t: torch.zeros(4, device=t.device) + torch.arange(
        4, device=t.device)),
    Case("full", lambda t: torch.full((2,), 3.0, device=t.device)),
    Case("new_zeros and new_full", lambda t: t.x.new_zeros(2) + t.x.new_full((2,), 3)),
    Case("scalar_tensor", lambda t: torch.scalar_tensor(2.0, device=t.device)),
    Case("empty_like", lambda t: torch.empty_like(t.x).copy_(t.x)),
    Case("clone and contiguous", lambda t: t.x.mT.contiguous().clone()),
    Case("dtype conversion", lambda t: t.x.to(torch.float64).half()),
    Case("to the same device", lambda t: (t.x + 1).to(t.device)),
    Case("to another tensor", lambda t: (t.ids + 1).to(t.x)),
    Case("as_tensor of a device tensor", lambda t: torch.as_tensor(t.x + 1, device=t.device)),
    Case("tril_indices", lambda t: torch.tril_indices(3, 3, device=t.device)),
    Case("rand", lambda t: torch.rand(4, device=t.device)),
    Case("rand with the default generator",
         lambda t: torch.rand(4, device=t.device, generator=t.default_generator)),
    Case("randn_like", lambda t: torch.randn_like(t.x)),
    Case("randint", lambda t: torch.randint(0, 9, (4,), device=t.device)),
    Case("exponential_", lambda t: t.x.exponential_()),
    Case("bernoulli", lambda t: torch.full_like(t.x, 0.5).bernoulli()),
    Case("dropout", lambda t: functional.dropout(t.x, 0.5)),
    Case("linear", lambda t: functional.linear(t.x, t.x, t.x[0])),
    Case("embedding", lambda t: functional.embedding(t.ids, t.x)),
    Case("layer_norm", lambda t: functional.layer_norm(t.x, (4,))),
    Case("rms_norm", lambda t: functional.rms_norm(t.x, (4,))),
    Case("SDPA", lambda t: functional.scaled_dot_product_attention(*[t.x[None, None]] * 3)),
    Case("cross_entropy", lambda t: functional.cross_entropy(t.x[:3], t.ids)),
    Case("grouped_mm bfloat16", lambda t: grouped(t, torch.bfloat16)),
    Case("einsum", lambda t: torch.einsum("ij,kj->ik", t.x, t.x)),
    Case("vector_norm", lambda t: torch.linalg.vector_norm(t.x, dim=-1)),
    Case("_foreach_add", lambda t: torch._foreach_add([t.x, t.v], 1)),
    Case("custom op", lambda t: doubled(t.x)),
    Case("custom op in place", lambda t: add_one_(t.x)),
]  # fmt: skip
GENERATORS = [
    Case("rand with its own generator",
         lambda t: torch.rand(4, device=t.device, generator=t.generator), UNSUPPORTED,
         NO_GENERATOR),
    Case("exponential_ with its own generator", lambda t: t.x.exponential_(generator=t.generator),
         UNSUPPORTED, NO_GENERATOR),
]  # fmt: skip
FURTHER = [
    Case("pinned copy that does not block", lambda t: t.x.copy_(t.pinned, non_blocking=True)),
    Case("pinned to(device, non_blocking)", lambda t: t.pinned.to(t.device, non_blocking=True)),
    Case('to("cpu", non_blocking)', lambda t: t.x.to("cpu", non_blocking=True)),
    Case("tensor(number, device)", lambda t: torch.tensor(2.0, device=t.device), SYNC),
    Case("tensor([], device)", lambda t: (t.x + 1, torch.tensor([], device=t.device))[0]),
    Case("list of booleans as index", lambda t: t.x[[True, False, True, False]], SHAPE),
    Case("number into one element", lambda t: assign(t.v, 0, 3.0), SYNC),
    Case("number into a row", lambda t: assign(t.x, 0, 3.0)),
    Case("host scalar into one element", lambda t: assign(t.v, 0, torch.tensor(3.0)), SYNC),
    Case("number behind an integer index", lambda t: assign(t.v, t.ids, 0.0), SYNC),
    Case("multinomial", lambda t: t.x.multinomial(1)),
    Case("multinomial of several", lambda t: t.x.multinomial(2)),
    Case("multinomial with replacement", lambda t: t.x.multinomial(2, replacement=True)),
    Case("multinomial with its own generator",
         lambda t: t.x.multinomial(1, generator=t.generator), UNSUPPORTED),
    Case("randperm", lambda t: torch.randperm(8, device=t.device)),
    Case("manual_seed", lambda t: (torch.manual_seed(1), t.x + 1)[1]),
    Case("nonzero_static", lambda t: torch.nonzero_static(t.x, size=4)),
    Case("masked_scatter_", lambda t: t.x.masked_scatter_(t.x > 0.5, t.x.clone())),
    Case("deepcopy", lambda t: copy.deepcopy(t.x)),
    Case("quantile", lambda t: torch.quantile(t.x, 0.5, dim=0)),
    Case("quantiles of a tensor", lambda t: torch.quantile(t.v, t.one[None] / 2)),
    Case("median", lambda t: t.v.median()),
    Case("mode", lambda t: t.v.mode()),
    Case("isin", lambda t: torch.isin(t.v, t.v[:2])),
    Case("fft", lambda t: torch.fft.fft(t.v)),
    Case("embedding with max_norm", lambda t: functional.embedding(t.ids, t.x, max_norm=1.0)),
    Case("embedding_bag", lambda t: functional.embedding_bag(t.ids[None], t.x)),
    Case("grouped_mm float16", lambda t: grouped(t, torch.float16), SYNC),
    Case("linalg.inv_ex", lambda t: torch.linalg.inv_ex(t.x)),
    Case("linalg.qr", lambda t: torch.linalg.qr(t.x)),
    Case("linalg.det", lambda t: torch.linalg.det(t.x)),
    Case("linalg.lstsq", lambda t: torch.linalg.lstsq(t.x, t.x), SHAPE),
    Case("matrix_power", lambda t: torch.linalg.matrix_power(t.x, 3)),
    Case("a read outside of captures",
         lambda t: t.x + (0 if torch.cuda.is_current_stream_capturing() else t.x.sum().item())),
    Case("a read in captures",
         lambda t: t.x + (t.x.sum().item() if torch.cuda.is_current_stream_capturing() else 0),
         SYNC),
    Case("encoder layer", encoded),
    Case("encoder layer with a mask of pads", lambda t: encoded(t, ~t.mask[None])),
    Case("attention without weights", attended),
    Case("torch.cond", lambda t: torch.cond(t.one > 0, torch.sin, torch.cos, (t.x,)),
         UNSUPPORTED),
]  # fmt: skip
CUDA_ONLY = [
    Case("pinned copy that blocks", lambda t: t.x.copy_(t.pinned), SYNC),
    Case("pin_memory", lambda t: (t.x + 1, torch.tensor([1, 2]).pin_memory())[0]),
    Case("frombuffer().to(device)",
         lambda t: torch.frombuffer(bytearray(8), dtype=torch.float32).to(t.device), SYNC),
    Case("custom op that reads a value", lambda t: first_value(t.x), SYNC),
    Case("linalg.svd", lambda t: torch.linalg.svd(t.x), SYNC),
]  # fmt: skip
"""Cases that no CPU can show; the documentation of ``RecorderBackend`` lists them."""
CASES = [*READS, *SHAPES, *UPLOADS, *HOST, *TAKEN, *GENERATORS, *FURTHER]


class Replays(NamedTuple):
    """Several graphs of one backend, and what they leave.

    ``function`` captures them, replays them and returns numbers. A case that ``loops`` needs
    ``Backend.loop``.
    """

    name: str
    function: Callable[[Backend], list[Any]]
    expected: list[Any]
    loops: bool = False


def held_output(backend: Backend) -> list[Any]:
    """Read an output before and after a replay of another graph."""
    x = torch.arange(4.0, device=backend.device)
    with backend.session():
        first, second = (backend.capture(lambda n=n: x + n) for n in (1, 2))
    first.replay()
    values = [first.output.tolist()]
    second.replay()
    values.append(second.output.tolist())
    is_intact = first.output.tolist() == values[0]
    first.replay()
    return [*values, is_intact, first.output.tolist()]


def cloned_output(backend: Backend) -> list[Any]:
    """Clone an output before a replay of another graph."""
    x = torch.arange(4.0, device=backend.device)
    with backend.session():
        first, second = (backend.capture(lambda n=n: x + n) for n in (1, 2))
    first.replay()
    kept = first.output.clone()
    second.replay()
    return [kept.tolist()]


def chained_parts(backend: Backend) -> list[Any]:
    """Read the results of earlier graphs, between replays of another graph."""
    x, made, graphs, found = torch.zeros(2, device=backend.device), [], [], []
    with backend.session():
        graphs.append(backend.capture(lambda: made.append(x + 1)))
        graphs.append(backend.capture(lambda: made.append(made[0] * 2)))
        graphs.append(backend.capture(lambda: made[0] + made[1]))
        other = backend.capture(lambda: x + 9)
    for number in range(3):
        x.fill_(number)
        for graph in graphs:
            graph.replay()
        found.append(graphs[-1].output.tolist())
        other.replay()
    return found


def replays_and_loops(backend: Backend) -> list[Any]:
    """Append a number per body and per replay to a list on the device."""
    device = backend.device
    log, place = (torch.zeros(n, dtype=torch.int64, device=device) for n in (16, 1))
    left, again, body = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(3))

    def append(number: int) -> None:
        log.index_fill_(0, place, number)
        place.add_(1)

    def begin() -> None:
        left.fill_(3)
        body.fill_(1)

    def step(number: int) -> None:
        append(number)
        left.sub_(1)
        again.copy_(left > 0)
        body.copy_(left % 2)

    with backend.session():
        prologue = backend.capture(begin)
        bodies = [backend.capture(lambda n=n: step(n)) for n in (1, 2)]
        replayed = backend.capture(lambda: append(9))
        loops = [backend.loop(prologue, each, again, body) for each in (bodies, bodies[::-1])]
    log.zero_()
    place.zero_()
    for graph in (loops[0], replayed, loops[0], loops[1], replayed):
        graph.replay()
    loops[0].wait()
    found = log[: int(place)].tolist()
    for loop in loops:
        loop.close()
    return found


REPLAYS = [
    Replays("held output", held_output,
            [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0], False, [1.0, 2.0, 3.0, 4.0]]),
    Replays("cloned output", cloned_output, [[1.0, 2.0, 3.0, 4.0]]),
    Replays("chained parts", chained_parts, [[3.0, 3.0], [6.0, 6.0], [9.0, 9.0]]),
    Replays("replays and loops", replays_and_loops,
            [2, 1, 2, 9, 2, 1, 2, 1, 2, 1, 9], loops=True),
]  # fmt: skip
