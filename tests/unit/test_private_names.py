"""Private names of torch and CPython: each has one module, exists, and does what that assumes.

A failure here names a version that graphkit was not checked on: the module that it names must
follow the change. A failure elsewhere with all of these green is a bug of graphkit.
"""

from __future__ import annotations

import ast
import importlib
import platform
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import graphkit.graphs.capture_state as capture_state
from graphkit.graphs.host_calls import caller_passes
from graphkit.graphs.operations import generator_id, schema, storage_id
from graphkit.graphs.source_lines import running_module
from graphkit.graphs.walk.kernels import demangled
from graphkit.ops.registration import without_autograd

ROOT = Path(__file__).resolve().parents[2]
OWNERS = {
    "graphkit/graphs/capture_state.py": {
        "torch._C.DisableTorchFunction",
        "torch._C._DisableAutocast",
        "torch.cuda.graphs._cuda_isCurrentStreamCapturing",
        "torch.overrides._len_torch_function_stack",
        "torch.overrides._pop_mode_temporarily",
    },
    "graphkit/graphs/capture_rules.py": {
        "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo"
    },
    "graphkit/graphs/cuda_graph.py": {
        "torch._C._cuda_getCurrentRawStream",
        "torch._C._cuda_getDevice",
    },
    "graphkit/graphs/source_lines.py": {
        "torch.nn.Module._call_impl",
        "torch._dynamo.eval_frame.OptimizedModule",
    },
    "graphkit/graphs/operations.py": {
        "torch._ops.OpOverload",
        "torch.ops.aten.mm.default._schema",
        "torch.UntypedStorage._cdata",
        "torch.Generator._cdata",
    },
    "graphkit/graphs/recorded_graph.py": {"torch.ops._c10d_functional.wait_tensor"},
    "graphkit/graphs/walk/kernels.py": {"torch._C._demangle"},
    "graphkit/models/residual.py": {"torch.Tensor._make_wrapper_subclass"},
    "graphkit/ops/registration.py": {"torch._C._AutoDispatchBelowAutograd"},
    "graphkit/distributed/connections.py": {
        "torch.distributed.ProcessGroup._get_backend",
        "torch.distributed.ProcessGroup._get_sequence_number_for_group",
        "torch._C._distributed_c10d.ProcessGroupGloo._set_default_timeout",
    },
    "graphkit/distributed/push_collectives.py": {
        "torch.distributed._symmetric_memory.empty",
        "torch.distributed._symmetric_memory.rendezvous",
    },
    "graphkit/distributed/rank_store.py": {"torch._C._distributed_c10d.Store"},
}
"""Private names of torch that graphkit uses, by the module that owns them."""
ONLY_CUDA = "torch._C._cuda_get"
"""Names that a torch without CUDA does not have."""
DOCUMENTED = ("torch.utils._pytree", "torch.utils._python_dispatch")
"""Modules that torch's notes on extending it import, or that other libraries rely on."""
VERSIONS = f"torch {torch.__version__} and Python {platform.python_version()}"


def changed(owner, what):
    """Return the message of a test that finds a change."""
    return f"{VERSIONS} changed {what}, which graphkit/{owner} relies on: see its docstring."


def source_files():
    """Yield the path in the repository and the file of each module of the package."""
    for room in ("graphkit", "runners", "buffers"):
        for file in (ROOT / room).rglob("*.py"):
            path = file.relative_to(ROOT)
            if path.parts[:2] not in (("graphkit", "runners"), ("graphkit", "buffers")):  # links
                yield path.as_posix(), file


def private_names(file):
    """Yield the private names of torch in a file: paths from ``torch`` on, and owned attributes."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [ast.unparse(node)]
        else:
            continue
        for name in found:
            first, *parts = name.split(".")
            is_private = any(part.startswith("_") and part[-2:] != "__" for part in parts)
            if first == "torch" and is_private and "(" not in name:
                if not name.startswith(DOCUMENTED):
                    yield name
            elif parts and parts[-1] in ATTRIBUTES:
                yield parts[-1]


ATTRIBUTES = {
    name.rpartition(".")[2]
    for names in OWNERS.values()
    for name in names
    if name.rpartition(".")[2].startswith("_")
}


@pytest.mark.slow
def test_each_private_name_of_torch_has_one_module():
    found = []
    for path, file in source_files():
        owned = OWNERS.get(path, set())
        last = {name.rpartition(".")[2] for name in owned}
        found += [
            f"{path}: {name}"
            for name in private_names(file)
            if name not in last and not any(each.startswith(name) for each in owned)
        ]
    assert not found, "private names outside of their module:\n" + "\n".join(sorted(set(found)))


def test_the_search_finds_a_private_name(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("import torch._inductor\ntorch._C._x()\ntensor._cdata\nself._cdata_of\n")
    assert sorted(private_names(file)) == ["_cdata", "torch._C", "torch._C._x", "torch._inductor"]


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in OWNERS.items() for name in sorted(names)]
)
def test_a_private_name_exists(owner, name):
    if name.startswith(ONLY_CUDA) and torch.version.cuda is None:
        pytest.skip("torch is built without CUDA")
    parts = name.split(".")
    found = None
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[end:]:
        found = getattr(found, part, None)
        assert found is not None, changed(owner.removeprefix("graphkit/"), name)


def test_schemas_say_what_an_operation_writes():
    arguments = {each.name: each for each in schema(torch.ops.aten.add_.Tensor).arguments}
    works = arguments["self"].alias_info.is_write and arguments["other"].alias_info is None
    assert works, changed("graphs/operations.py", "OpOverload._schema")


def test_a_storage_and_a_generator_have_one_identity():
    tensor, others = torch.zeros(4), torch.zeros(4)
    same = storage_id(tensor) == storage_id(tensor[1:]) != storage_id(others)
    assert same, changed("graphs/operations.py", "UntypedStorage._cdata")
    default = torch.default_generator
    same = generator_id(default) == generator_id(default) != generator_id(torch.Generator())
    assert same, changed("graphs/operations.py", "Generator._cdata")


def test_a_call_can_skip_its_autograd_kernel():
    message = changed("ops/registration.py", "_AutoDispatchBelowAutograd")
    x = torch.ones(2, requires_grad=True)
    with without_autograd():
        assert (x * 2).grad_fn is None, message
    assert (x * 2).grad_fn is not None, message


def test_the_guards_of_torch_turn_modes_off():
    class Mode(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    with Mode() as mode, capture_state.disable_function_modes():
        torch.ones(2)
    assert not mode.calls, changed("graphs/capture_state.py", "torch._C.DisableTorchFunction")
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16), capture_state.disable_autocast():
        dtype = (x @ x).dtype
    assert dtype is torch.float32, changed("graphs/capture_state.py", "torch._C._DisableAutocast")


def test_torch_asks_the_replaced_functions():
    with capture_state.recording():
        reports = torch.cuda.is_current_stream_capturing()
    assert reports is True, changed("graphs/capture_state.py", "is_current_stream_capturing")


def test_a_mode_may_do_without_the_wrapper_of_dynamo():
    asked = []

    class Mode(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls):
            asked.append(cls)
            return False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2)
    assert asked, changed("graphs/capture_rules.py", "TorchDispatchMode._should_skip_dynamo")


def test_the_frame_of_a_call_has_its_module():
    class Child(nn.Module):
        def forward(self):
            frame, stack = sys._getframe(), []
            while frame is not None:
                stack.append(frame)
                frame = frame.f_back
            return running_module(stack[::-1])

    path = nn.Sequential(Child())
    path.forward = path[0].__call__
    assert path() == "Sequential.0", changed("graphs/source_lines.py", "nn.Module._call_impl")


def test_a_compiled_module_keeps_its_module():
    module = nn.Linear(2, 2)
    kept = torch.compile(module, backend="eager")._orig_mod
    assert kept is module, changed("graphs/source_lines.py", "OptimizedModule._orig_mod")


def test_symbols_are_demangled():
    name = demangled("_ZN2at6native3addEi")
    assert name == "at::native::add(int)", changed("graphs/walk/kernels.py", "_demangle")


def test_a_process_group_counts_and_limits_its_collectives():
    owner = "distributed/connections.py"
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        group = dist.group.WORLD
        before = group._get_sequence_number_for_group()
        dist.all_reduce(torch.zeros(1))
        counts = group._get_sequence_number_for_group() > before
        assert counts, changed(owner, "ProcessGroup._get_sequence_number_for_group")
        backend = group._get_backend(torch.device("cpu"))
        limit = backend.options._timeout / 2
        backend._set_default_timeout(limit)
        assert backend.options._timeout == limit, changed(owner, "Backend._set_default_timeout")
    finally:
        dist.destroy_process_group()


class Caller(TorchFunctionMode):
    """Notes whether calls of ``torch.zeros`` are written with the literal ``cpu``."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.zeros:
            self.found.append(caller_passes("cpu", "zeros"))
        return func(*args, **(kwargs or {}))


def test_bytecode_shows_the_literals_of_a_call():
    device = "".join(["c", "pu"])
    with Caller() as mode:
        torch.zeros(2, device="cpu")
        torch.zeros(2, device=device)
        torch.zeros(
            2,
            device="cpu",
        )
        "cpu", torch.zeros(2, device=device)
    expected = [True, False, True, False]
    assert mode.found == expected, changed("graphs/host_calls.py", "its bytecode")
