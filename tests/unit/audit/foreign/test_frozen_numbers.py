"""Numbers of the host that a program changes while its graph replays, on recorded graphs."""

from __future__ import annotations

import sys

import pytest
import torch
from graphbugs import frame

WARN = "warning"
PREAMBLE = """
import torch
from graphbugs.frame import capture, new_graph, numbered, tensor

x, out = numbered(4, 8), tensor(4, 8, value=0)

class Engine:
    def __init__(self, **values):
        vars(self).update(values)
        self.graphs = {}

    def capture(self, step):
        self.graph = graph = new_graph()
        with capture(graph):
            step()
        return graph
"""
CASES = {
    "an attribute": """
def program():
    engine = Engine(scale=2.0)
    graph = engine.capture(lambda: out.copy_(x * engine.scale))
    graph.replay()
    engine.scale = 3.0
    graph.replay()
""",
    "an item of a dict in an attribute": """
def program():
    engine = Engine(config={"scale": 2.0})
    graph = engine.capture(lambda: out.copy_(x * engine.config["scale"]))
    engine.config = {"scale": 3.0}
    graph.replay()
""",
    "a slice end that is computed": """
def program():
    engine = Engine(length=3)
    graph = engine.capture(lambda: out[:, : engine.length + 1].mul_(2))
    engine.length += 1
    graph.replay()
""",
    "the length of a list": """
def program():
    engine = Engine(tokens=[1, 2])
    graph = engine.capture(lambda: out[: len(engine.tokens)].add_(1))
    engine.tokens.append(3)
    graph.replay()
""",
    "a module global": """
SCALE = 2.0

def program():
    global SCALE
    graph = Engine().capture(lambda: out.copy_(x * SCALE))
    SCALE = 3.0
    graph.replay()
""",
    "a variable of the function that replays": """
def program():
    length = 3
    graph = new_graph()
    with capture(graph):
        out[:, :length].mul_(2)
    for length in (4, 5):
        graph.replay()
""",
    "a parameter of the function that replays": """
def decode(engine, length):
    if "decode" not in engine.graphs:
        engine.graphs["decode"] = engine.capture(lambda: attend(x, length=length))
    engine.graphs["decode"].replay()

def attend(x, *, length):
    out[:, :length] = x[:, :length]

def program():
    engine = Engine()
    for length in (3, 4):
        decode(engine, length)
""",
    "a keyword in a dict of keywords": """
def attend(x, **options):
    out.copy_(x * options["scale"])

def program():
    engine = Engine(options={"scale": 2.0})
    graph = engine.capture(lambda: attend(x, **engine.options))
    engine.options["scale"] = 3.0
    graph.replay()
""",
    "an attribute of a config, through a variable of the forward": """
class Layer(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        scale = self.config.scale
        return x * scale

def program():
    layer = Layer(Engine(scale=2.0))
    graph = Engine().capture(lambda: out.copy_(layer(x)))
    layer.config.scale = 3.0
    graph.replay()
""",
    "an assigned number": """
def program():
    engine = Engine(fill=2.0)
    def step():
        out[:, :2] = engine.fill
    graph = engine.capture(step)
    engine.fill = 3.0
    graph.replay()
""",
}
CASES["a length that is padded to another size"] = """
def program():
    engine = Engine(length=3)
    def step():
        size = -(-engine.length // 4) * 4
        out[:, :size].mul_(2)
    graph = engine.capture(step)
    for engine.length in (4, 5):
        graph.replay()
"""
CASES["a float beside an equal size in the key"] = """
def program():
    engine = Engine(temperature=1.0)
    graph = engine.graphs[1] = engine.capture(lambda: out.copy_(x / engine.temperature))
    graph.replay()
    engine.temperature = 0.5
    graph.replay()
"""
SOUND = {
    "a number that no operation gets": """
def program():
    engine = Engine(scale=2.0, steps=2)
    graph = engine.capture(lambda: out.copy_(x * engine.scale))
    for _ in range(4):
        engine.steps += 1
        graph.replay()
""",
    "a number in the key of the graph": """
def program():
    engine = Engine(length=3)
    for length in (3, 4, 3):
        engine.length = length
        if length not in engine.graphs:
            engine.graphs[length] = engine.capture(lambda: out[:, : engine.length].mul_(2))
        engine.graphs[length].replay()
    engine.length = 5
    engine.graphs[4].replay()
""",
    "a padded number in the key of the graph": """
def pad(length):
    return -(-length // 4) * 4

def program():
    engine = Engine(length=3)
    for length in (3, 4, 5, 3):
        engine.length = length
        size = pad(engine.length)
        if ("decode", size) not in engine.graphs:
            engine.graphs["decode", size] = engine.capture(lambda: out[:, :size].mul_(2))
        engine.graphs["decode", size].replay()
""",
    "graphs of several sizes in a list": """
def program():
    engine, graphs, sizes = Engine(), [], (1, 2, 4)
    for size in sizes:
        graphs.append(engine.capture(lambda: out[:size].mul_(2)))
    for graph in graphs:
        graph.replay()
""",
    "a number that changes and comes back": """
def program():
    engine = Engine(scale=2.0)
    graph = engine.capture(lambda: out.copy_(x * engine.scale))
    engine.scale = 3.0
    engine.scale = 2.0
    graph.replay()
""",
    "an object that is gone": """
def program():
    graph, engine = new_graph(), Engine(scale=2.0)
    with capture(graph):
        out.copy_(x * engine.scale)
    del engine
    graph.replay()
""",
    "a decode step of transformers": """
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

def program():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    model, cache = LlamaForCausalLM(config).eval(), StaticCache(config=config, max_cache_len=16)
    model(input_ids=torch.tensor([[5, 9, 3]]), past_key_values=cache)
    token, position = torch.tensor([[7]]), torch.tensor([3])
    def step():
        return model(input_ids=token, past_key_values=cache, cache_position=position,
                     position_ids=position[None]).logits
    graph, engine = new_graph(), Engine(position=3)
    step()
    with capture(graph):
        logits = step()
    for _ in range(4):
        graph.replay()
        engine.position += 1
        position.add_(1)
""",
    "a number that is padded to the same size": """
def program():
    engine = Engine(length=3)
    def step():
        size = -(-engine.length // 4) * 4
        out[:, :size].mul_(2)
    graph = engine.capture(step)
    for engine.length in (2, 4):
        graph.replay()
""",
    "a number that decides a branch at the call": """
def program():
    engine = Engine(number=0)
    def step(x, is_wide):
        return x.sum(0, keepdim=True) if is_wide else x
    graph = engine.capture(lambda: step(x, engine.number % 2 == 0))
    for _ in range(3):
        engine.number += 2
        graph.replay()
""",
    "a capture after each change": """
def program():
    engine = Engine(scale=2.0)
    for scale in (2.0, 3.0):
        engine.scale = scale
        engine.graphs[4] = engine.capture(lambda: out.copy_(x * engine.scale))
        engine.graphs[4].replay()
""",
}


@pytest.fixture
def findings(tmp_path):
    """Return ``findings(text)``: those of a program with the given functions, without notes."""

    def run(text, name="program"):
        path = tmp_path / f"{name}.py"
        path.write_text(PREAMBLE + text)
        report = frame.audited(path, tmp_path / "report.json")
        del sys.modules[f"graphbugs_{name}"]
        return [found for found in report.findings if found.severity != "note"]

    return run


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="GraphBugs runs on the GPU")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_frozen_number_is_found_with_its_line(findings, case):
    (found,) = findings(CASES[case])
    assert (found.kind, found.severity) == ("frozen value", "error")
    lines = (PREAMBLE + CASES[case]).splitlines()
    number = int(found.source.partition(":")[2].partition(" ")[0])
    assert any(word in lines[number - 1] for word in ("out", "x *", "x /")), found.source
    assert found.before != found.after
    assert found.before in found.text


@pytest.mark.slow
@pytest.mark.parametrize("case", SOUND)
def test_a_sound_program_has_no_finding(findings, case):
    assert findings(SOUND[case]) == []


def test_the_name_of_a_number_is_its_path(findings):
    (found,) = findings(CASES["an item of a dict in an attribute"], "first")
    assert found.names == ("Engine.config['scale']",)
    (found,) = findings(CASES["a module global"], "second")
    assert found.names == ("graphbugs_second.SCALE",)
    assert (found.before, found.after) == ("2.0", "3.0")


def test_two_graphs_of_one_key_with_different_numbers_are_a_warning(findings):
    text = """
def program():
    engine, kept = Engine(), []
    for scale in (2.0, 3.0):
        graph = engine.graphs[4] = engine.capture(lambda: out.copy_(x * int(scale) * 1.0))
        kept.append({4: graph})
        graph.replay()
"""
    (found,) = findings(text)
    assert found.severity == WARN
    assert "[4]" in found.text


TRITON = """
from triton.runtime.jit import JITFunction

def scale(out, factor, BLOCK):
    pass

kernel = JITFunction(scale)

def program():
    engine = Engine(factor=2.0, blocks=3)
    def step():
        kernel[(engine.blocks + 1,)](out, engine.factor, BLOCK=8)
        out.mul_(2)
    graph = engine.capture(step)
    graph.replay()
    {change}
    graph.replay()
"""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("engine.factor = 3.0", "`Engine.factor` was 2.0 at the capture and is 3.0 now"),
        ("engine.blocks = 4", "`Engine.blocks` was 3 at the capture and is 4 now"),
        ("engine.other = 4", None),
    ],
)
def test_numbers_of_a_launch_of_triton_are_followed(findings, monkeypatch, change, expected):
    jit = pytest.importorskip("triton.runtime.jit")
    launches = []

    def run(kernel, *arguments, grid, warmup, **named):
        launches.append((grid, named))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    found = findings(TRITON.format(change=change))
    assert launches == [((4,), {"BLOCK": 8})]
    assert jit.JITFunction.run is run
    assert len(found) == (expected is not None)
    for finding in found:
        argument = "grid" if "blocks" in change else "factor"
        assert expected in finding.text
        assert f"in argument `{argument}` of `scale`" in finding.text
        assert finding.source.endswith("in step")
