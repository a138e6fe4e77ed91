"""Adapters register the graphs of engines, tested on stand-ins with the engines' interfaces.

The stand-ins have the signatures and attributes that SGLang 0.5.23, vLLM 0.33.0 and transformers
5.23 have at the points that the adapters wrap.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from graphbugs import frame

from graphkit.audit.foreign.adapters import sglang, transformers, vllm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="recorded graphs")

SGLANG = """
import enum, sys, types
from collections import defaultdict
from dataclasses import dataclass
import torch
from graphbugs.frame import capture, new_graph, numbered, tensor

def module(name, **names):
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(names)

@dataclass(frozen=True)
class ShapeKey:
    size: int
    stream_idx: int | None = None
    variant_label: str | None = None
    attention_variant: str | None = None

class PaddingPolicy(enum.Enum):
    KEEP_PAD = "keep_pad"
    ZERO = "zero"

@dataclass
class Slot:
    name: str
    buffer: torch.Tensor
    padding_policy: PaddingPolicy
    axis: str = "bs"
    pad_value: float = 0
    enabled: bool = True
    slice_fn: object = None

class HookType(enum.Enum):
    AROUND = "around"

class HookRegistry:
    hooks = defaultdict(list)

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AROUND, *, source=None):
        cls.hooks[target].append(hook)

class FullCudaGraphBackend:
    def __init__(self, cuda_graph_runner):
        self._cuda_graph_runner, self._graphs, self._outputs = cuda_graph_runner, {}, {}

    def capture_one(self, shape_key, forward_fn, capture_inputs=None, post_warmup_hook=None):
        forward_fn()
        graph = new_graph()
        with capture(graph):
            out = forward_fn()
        self._graphs[shape_key], self._outputs[shape_key] = graph, out

backend = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend"
module(backend, FullCudaGraphBackend=FullCudaGraphBackend)
module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType)

@dataclass
class Output:
    next_token_logits: torch.Tensor
    hidden_states: object = None

class DecodeCudaGraphRunner:
    captured_req_width, ragged_verify_mode = 1, False

    def __init__(self):
        slots = [Slot("input_embeds", numbered(8, 4), PaddingPolicy.KEEP_PAD),
                 Slot("mask", tensor(8, 1), PaddingPolicy.ZERO),
                 Slot("seq_lens_sum", tensor(1), PaddingPolicy.KEEP_PAD, axis="none")]
        self.slots = {slot.name: slot for slot in slots}
        self.buffer_registry = types.SimpleNamespace(
            slot_names=lambda: list(self.slots), get_slot=self.slots.__getitem__)
        self.backend, self.raw_bs = FullCudaGraphBackend(self), 0

    def forward(self):
        rows = self.slots["input_embeds"].buffer[:4]
        return Output(rows - rows.mean(0) if LEAKS else rows * 2)

    def execute(self, raw_bs, size=4):
        self.raw_bs, self._replay_graph_key = raw_bs, ShapeKey(size)
        self.backend._graphs[ShapeKey(4)].replay()

def start():
    from graphkit.audit.foreign.adapters.sglang import plug_in
    assert plug_in()
    (hook,) = HookRegistry.hooks[f"{backend}.FullCudaGraphBackend.capture_one"]
    runner = DecodeCudaGraphRunner()
    hook(FullCudaGraphBackend.capture_one, runner.backend, ShapeKey(4), runner.forward)
    return runner
"""
VLLM = """
import sys, types
from dataclasses import dataclass
from graphbugs.frame import capture, new_graph, numbered, tensor

@dataclass(frozen=True)
class Descriptor:
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    max_query_len: int | None = None

class CudaGraphManager:
    def __init__(self, descs):
        self.graphs, self._descs = {}, descs

    def capture(self, create_forward_fn, progress_bar_desc=""):
        for desc in self._descs:
            create_forward_fn(desc, warmup=True)("NONE")
            forward_fn = create_forward_fn(desc, warmup=False)
            graph = new_graph()
            with capture(graph):
                forward_fn("NONE")
            self.graphs[desc] = graph

    def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras,
                 max_query_len=None, num_ubatches=1):
        return next(desc for desc in self._descs if desc.num_tokens >= num_tokens)

    def run_fullgraph(self, desc):
        self.graphs[desc].replay()

made = sys.modules["vllm.v1.worker.gpu.cudagraph_utils"] = types.ModuleType("cudagraph_utils")
made.CudaGraphManager = CudaGraphManager
rows, out = numbered(8), tensor(8, 4, value=0)

def create_forward_fn(desc, warmup):
    return lambda mode: out[: desc.num_tokens].copy_(rows[: desc.num_tokens] * 2)

def serve(descs, *batches):
    from graphkit.audit.foreign.adapters.vllm import plug_in
    assert plug_in()
    manager = CudaGraphManager(descs)
    manager.capture(create_forward_fn)
    for batch in batches:
        manager.run_fullgraph(manager.dispatch(*batch))
"""
BATCHING = """
import types
from graphbugs.frame import capture, new_graph, numbered, tensor
from transformers.generation.continuous_batching import model_runner

keys = numbered(32, 4)

class ModelRunner:
    def __init__(self, key):
        self.graphs = {}
        self.out = tensor(4, value=0)
        self.inputs_and_outputs = types.SimpleNamespace(
            _get_graph_key=lambda: key(self.batch), get_graph=lambda: self.graphs[key(self.batch)])

    def _capture_graph(self, forward_fn, compute_stream, *args):
        forward_fn(*args)
        graph = new_graph()
        with capture(graph):
            forward_fn(*args)
        self.graphs[self.inputs_and_outputs._get_graph_key()] = graph

    def compute_batch(self, model, batch_data):
        self.batch = batch_data
        if self.inputs_and_outputs._get_graph_key() in self.graphs:
            self.inputs_and_outputs.get_graph().replay()
        else:
            args = (model, batch_data, None, None, self.out)
            self._capture_graph(self.forward, None, *args)

    def forward(self, model, batch_data, carry_over_ids, prev_output_ids, output_ids):
        longest = batch_data["max_seqlen_k"]
        output_ids.copy_(keys[:longest].sum(0))

model_runner.ModelRunner = ModelRunner

def serve(key, *lengths):
    from graphkit.audit.foreign.adapters.transformers import plug_in
    assert plug_in()
    runner = ModelRunner(key)
    for length in lengths:
        runner.compute_batch(None, {"q": 1, "max_seqlen_k": length})
"""


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Return ``report(text)``: that of a program that plugs an adapter into a stand-in."""
    monkeypatch.setenv("GRAPHKIT_AUDIT", str(tmp_path / "report.json"))
    before = set(sys.modules)

    def run(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return frame.audited(path, tmp_path / "report.json")

    yield run
    for name in set(sys.modules) - before:
        if name.startswith(("graphbugs_program", "sglang.", "vllm.")):
            del sys.modules[name]


def found(report):
    return [(one.audit, one.kind, one.mode) for one in report.findings if one.severity != "note"]


def checked(report, audit):
    return [check.text for check in report.checks if check.audit == audit]


@pytest.mark.parametrize("leaks", [False, True])
def test_sglang_graphs_have_inputs_pads_and_a_body(report, leaks):
    result = report(f"{SGLANG}\nLEAKS = {leaks}\ndef program():\n    start().execute(3)\n")
    name = "DecodeCudaGraphRunner 4"
    assert found(result) == ([("pads", "leaking pad row", name)] if leaks else [])
    assert checked(result, "shadow") == ["compared 3 live rows with the body"]
    assert checked(result, "pads") == ["1 pad row with three contents"]


def test_sglang_replays_of_another_key_are_found(report):
    result = report(f"{SGLANG}\nLEAKS = False\ndef program():\n    start().execute(3, size=8)\n")
    assert found(result) == [("misses", "wrong graph", "DecodeCudaGraphRunner 4")]
    assert "ShapeKey(size=8" in result.findings[0].text


@pytest.mark.parametrize(
    ("desc", "batch", "text"),
    [
        ("Descriptor(4, 2)", "(2, 4, None, 0)", ""),
        ("Descriptor(4, 2)", "(3, 4, None, 0)", "3 requests"),
        ("Descriptor(4, 2, 2)", "(1, 3, 3, 0)", "3 tokens per request"),
        ("Descriptor(4, 4, max_query_len=2)", "(1, 3, None, 0, 3)", "3 tokens in a request"),
        ("Descriptor(4, 4, max_query_len=2)", "(2, 3, None, 0, 2)", ""),
    ],
)
def test_vllm_graphs_are_compared_with_the_batch_of_their_dispatch(report, desc, batch, text):
    result = report(f"{VLLM}\ndef program():\n    serve([{desc}], {batch})\n")
    assert [kind for _, kind, _ in found(result)] == (["wrong graph"] if text else [])
    assert all(text in one.text for one in result.findings if one.kind == "wrong graph")
    assert any(check.mode.startswith("CudaGraphManager 4 tokens") for check in result.checks)


def test_continuous_batching_is_compared_with_the_batch_at_hand(report, monkeypatch):
    module = pytest.importorskip("transformers.generation.continuous_batching.model_runner")
    monkeypatch.setattr(module, "ModelRunner", None)
    sound = report(f"{BATCHING}\ndef program():\n    serve(str, 4, 5, 4, 5)\n")
    assert found(sound) == []
    assert checked(sound, "shadow") == ["compared 0 live rows with the body"] * 2
    frozen = report(f"{BATCHING}\ndef program():\n    serve(lambda b: (b['q'],), 4, 5, 6)\n")
    assert [(audit, kind) for audit, kind, _ in found(frozen)] == [("shadow", "graph bug")]
    assert "`slice` gets" in frozen.findings[0].text


def test_the_adapter_fits_the_installed_transformers(monkeypatch, capsys):
    module = pytest.importorskip("transformers.generation.continuous_batching.model_runner")
    runner = module.ModelRunner
    for name in ("compute_batch", "_capture_graph"):
        monkeypatch.setattr(runner, name, getattr(runner, name))
    monkeypatch.setenv("GRAPHKIT_AUDIT", "report.json")
    assert transformers.plug_in()
    assert hasattr(runner._capture_graph, "_graphkit_original")
    assert capsys.readouterr().err == ""


def test_without_an_audit_nothing_is_imported_or_wrapped(monkeypatch):
    monkeypatch.delenv("GRAPHKIT_AUDIT", raising=False)
    assert [adapter.plug_in() for adapter in (sglang, vllm, transformers)] == [False] * 3
    assert "vllm" not in sys.modules


def test_another_version_is_named_and_not_wrapped(monkeypatch, capsys):
    class CudaGraphManager:
        def capture(self, model):
            pass

    module = ModuleType("vllm.v1.worker.gpu.cudagraph_utils")
    module.CudaGraphManager = CudaGraphManager
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setenv("GRAPHKIT_AUDIT", "report.json")
    assert not vllm.plug_in()
    error = capsys.readouterr().err
    assert "not for this version of vLLM" in error
    assert "parameters self, model, expected self, create_forward_fn" in error
