"""What runs an op in a test: its reference on the CPU, Triton's interpreter, or CUDA.

Arguments and results of a call are on the CPU, whatever runs it. The interpreter runs in a process
of its own (``tests/unit/ops/test_interpreted.py``), which selects the tests that are marked so.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton

from graphkit.graphs import RecorderBackend
from graphkit.ops.registration import OPS


class Run:
    """Calls ops on one device.

    Attributes:
        device: ``cpu``, ``interpreter`` or ``cuda``.
    """

    def __init__(self, device):
        self.device = device

    @property
    def torch_device(self):
        """Name of the device of tensors that do not leave it."""
        return "cuda" if self.device == "cuda" else "cpu"

    def __call__(self, op, *args, launch=None, **options):
        """Run an op; return its results, and write what it writes to the arguments.

        ``launch`` has options of the launcher, which the reference does not have.
        """
        registered = OPS[op.__name__]
        if self.device == "cpu":
            return op(*args, **options)
        if self.device == "interpreter":
            return registered.launch(registered.arguments(*args, **options), **launch or {})
        args = registered.arguments(*args, **options)
        moved = [on_cuda(arg) for arg in args]
        if launch is None:
            results = op(*moved)
        else:
            results = registered.launch(registered.arguments(*moved), **launch)
        written = getattr(torch.ops.graphkit, op.__name__).default._schema.arguments
        for argument, arg, other in zip(written, args, moved, strict=True):
            if argument.is_write and arg is not None:
                pairs = [(arg, other)] if torch.is_tensor(arg) else zip(arg, other, strict=True)
                for one, new in pairs:
                    one.copy_(new)
        return on_cpu(results)

    def __repr__(self):
        return self.device


def on_cuda(value):
    """Return a value with its tensors on CUDA, in the strides that they have.

    A tensor that is there stays the same, so that it may share memory with another one.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_cuda, value))
    if not isinstance(value, torch.Tensor) or value.is_cuda:
        return value
    if 0 in value.stride():
        return value.cuda()
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return made.copy_(value)


def on_cpu(results):
    """Return results on the CPU; they must be on CUDA."""
    if isinstance(results, tuple):
        return tuple(map(on_cpu, results))
    assert results is None or results.is_cuda
    return None if results is None else results.cpu()


CPU, INTERPRETER, CUDA = (Run(device) for device in ("cpu", "interpreter", "cuda"))
_MARKS = {CPU: [], INTERPRETER: [pytest.mark.interpreted], CUDA: [pytest.mark.gpu]}


def captured(run, act):
    """Return a graph of ``act``, with ``replay`` and ``output``, of the recorder or of CUDA."""
    if run is not CUDA:
        return RecorderBackend().capture(act)
    act()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = act()
    return SimpleNamespace(replay=graph.replay, output=output)


LOOPS = pytest.mark.skipif(
    triton.__version__ < "3.7", reason="triton 3.6 with numpy 2.4 cannot interpret such a loop"
)
"""For runs of the interpreter, of kernels with a loop to a number of a tensor."""


def by(*runs, interpreted=()):
    """Parametrise ``run``, for tests that are the same on several devices.

    ``interpreted`` has further marks of the interpreter's tests.
    """
    marks = _MARKS | {INTERPRETER: [*_MARKS[INTERPRETER], *interpreted]}
    params = [pytest.param(run, marks=marks[run], id=run.device) for run in runs]
    return pytest.mark.parametrize("run", params)


def by_each(name, *, cpu=(), interpreter=(), cuda=()):
    """Parametrise ``run`` and a value, of which each device has its own."""
    params = []
    for run, values in ((CPU, cpu), (INTERPRETER, interpreter), (CUDA, cuda)):
        for value in values:
            more = getattr(value, "marks", ())  # of ``pytest.param``
            (value,) = getattr(value, "values", (value,))
            params.append(
                pytest.param(run, value, marks=[*_MARKS[run], *more], id=f"{run.device}-{value}")
            )
    return pytest.mark.parametrize(("run", name), params)
