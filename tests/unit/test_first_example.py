"""Which files run for README's examples, and on the paths that CONTRIBUTING.md lists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
REPORT = """
import json, sys
files = {
    name: len(open(module.__file__, encoding="utf-8").readlines())
    for name, module in list(sys.modules.items())
    if name.split(".")[0] == "graphkit" and getattr(module, "__file__", None)
}
print(json.dumps(files))
"""


def readme_example(call):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return "import torch, graphkit as gk\n" + next(block for block in blocks if call in block)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["runner.replay(", "gk.capture("])
def test_an_example_executes_few_files_and_lines(call):
    done = subprocess.run(
        [sys.executable, "-c", readme_example(call) + REPORT],
        capture_output=True, text=True, check=True,
        env={name: text for name, text in os.environ.items() if not name.startswith("GRAPHKIT")},
    )  # fmt: skip
    files = json.loads(done.stdout.splitlines()[-1])
    assert {"graphkit.runners.replayer", "graphkit.graphs.recorder"} <= files.keys()
    assert len(files) <= 110
    assert sum(files.values()) <= 16_000
    rooms = {name.split(".")[1] for name in files if "." in name}
    assert not rooms & {"cli", "distributed", "engine", "models", "testing", "views"}


PATHS = {
    "A replay": """
batch = runner.sample_batch(1)
runner.replay(batch)
with Trace():
    runner.replay(batch)
""",
    "A step of v3": """
from graphkit.models.reference import default_checkpoint
model = gk.models.load(default_checkpoint(), device="cpu", check=False)
engine = model.engine(generation="v3", num_steps=1, steps_per_launch=2, max_context_len=64)
engine.capture()
engine.submit([72], gk.SamplingParams(max_new_tokens=30))
for _ in range(4):
    engine.step()
with Trace():
    for _ in range(4):
        engine.step()
""",
    "From a record to its page": """
from graphkit.records import load_record
from graphkit.views.html import html_text
from graphkit.views.selection import named_graphs
with Trace():
    record = load_record("tests/data/h200-capture.json")
    html_text(record, named_graphs(record))
""",
    "From a folder to a text": """
from graphkit.models.reference import default_checkpoint
with Trace():
    engine = gk.models.load(default_checkpoint(), device="cpu").engine(max_context_len=64)
    engine.generate([[72]], gk.SamplingParams(max_new_tokens=2))
""",
}
TRACE = """
import json, os, sys
import graphkit as gk
called = {}

def note(event, arguments):
    if event == "open":
        called.setdefault(str(arguments[0]))

class Trace:
    def __enter__(self):
        called.clear()
        sys.setprofile(lambda frame, *_: called.setdefault(frame.f_code.co_filename))

    def __exit__(self, *_):
        sys.setprofile(None)
        rooms = tuple(f"{os.getcwd()}/{room}/" for room in ("graphkit", "runners", "buffers"))
        files = [os.path.relpath(path) for path in called if path.startswith(rooms)]
        print(json.dumps([path.removeprefix("graphkit/") for path in files]))

sys.addaudithook(note)
"""
MOST_FILES = {"A replay": 6, "A step of v3": 8, "From a record to its page": 20}
ON_THE_RECORDER = {
    "graphs/cuda_graph.py": "graphs/recorded_graph.py",
    "graphs/cuda_loop.py": "graphs/recorded_loop.py",
}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_contributing_runs_through_its_files(path):
    text = (README.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.search(rf"\n### {path}\n(.*?)\n##", text, re.DOTALL).group(1)
    files = re.findall(r"^\d+\. `(.*?)`", section, re.MULTILINE)
    assert len(files) <= MOST_FILES.get(path, 40)
    done = subprocess.run(
        [sys.executable, "-c", TRACE + readme_example("runner.replay(") + PATHS[path]],
        capture_output=True, text=True, check=True, cwd=README.parent,
    )  # fmt: skip
    executed = json.loads(done.stdout.splitlines()[-1])
    on_recorder = [ON_THE_RECORDER.get(file, file) for file in files]
    assert on_recorder == [file for file in executed if file in on_recorder]
    if path == "From a record to its page":
        assert on_recorder == executed
    if path == "A replay":  # the recorder also runs what a device runs
        on_device = {"graphs/recorded_loop.py", *(file for file in executed if "ops/" in file)}
        assert {*executed} - on_device == {*on_recorder}


LOAD = """
import graphkit as gk
from graphkit.models.reference import default_checkpoint
model = gk.models.load(default_checkpoint(), device="cpu", check=False)
model.engine(max_context_len=64).generate([[72]], gk.SamplingParams(max_new_tokens=1))
"""


@pytest.mark.slow
def test_a_plain_model_needs_no_draft_heads_and_no_quantised_or_recurrent_layers():
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", LOAD + REPORT], capture_output=True, text=True, check=True
    )
    files = json.loads(done.stdout.splitlines()[-1])
    own = {name.removeprefix("graphkit.models.") for name in files if ".models." in name}
    optional = {"folder_weights", "plain_tensors", "expert_weights", "recurrent", "scans"}
    assert "loader" in own
    assert not {name for name in own if name.startswith("heads.")} | (own & optional)
    assert len(own) <= 42
