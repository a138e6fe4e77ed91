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
