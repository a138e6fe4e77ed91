"""README's examples of a function and of a runner execute a small part of graphkit."""

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


@pytest.mark.slow
@pytest.mark.parametrize("call", ["runner.replay(", "gk.capture("])
def test_an_example_executes_few_files_and_lines(call):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    example = "import torch, graphkit as gk\n" + next(block for block in blocks if call in block)
    done = subprocess.run(
        [sys.executable, "-c", example + REPORT], capture_output=True, text=True, check=True,
        env={name: text for name, text in os.environ.items() if not name.startswith("GRAPHKIT")},
    )  # fmt: skip
    files = json.loads(done.stdout.splitlines()[-1])
    assert {"graphkit.runners.replayer", "graphkit.graphs.recorder"} <= files.keys()
    assert len(files) <= 110
    assert sum(files.values()) <= 16_000
    rooms = {name.split(".")[1] for name in files if "." in name}
    assert not rooms & {"cli", "distributed", "engine", "models", "testing", "views"}


PAGE = """
import json, os, sys
from pathlib import Path
import graphkit
from graphkit.records import load_record
from graphkit.views.html import html_text
from graphkit.views.selection import named_graphs
root, executed = Path(graphkit.__file__).parent, set()

def note(path):
    path = Path(path)
    if path.is_relative_to(root):
        executed.add(path.relative_to(root).as_posix())

def hear(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        note(arguments[0])

sys.addaudithook(hear)
sys.setprofile(lambda frame, event, _: event == "call" and note(frame.f_code.co_filename))
record = load_record(sys.argv[1])
html_text(record, named_graphs(record))
sys.setprofile(None)
print(json.dumps(sorted(executed)))
"""


@pytest.mark.slow
def test_a_record_reaches_its_page_through_few_files():
    """Those whose functions run, and the files of the page itself."""
    record = README.parent / "tests" / "data" / "h200-capture.json"
    done = subprocess.run(
        [sys.executable, "-c", PAGE, record], capture_output=True, text=True, check=True
    )
    executed = json.loads(done.stdout)
    assert {"records/record.py", "views/html.py", "views/web/page.html"} <= {*executed}
    assert len(executed) <= 20, executed


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
