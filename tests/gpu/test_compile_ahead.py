"""A first capture compiles kernels in parallel, and its engine writes the same text."""

import json
import os
import subprocess
import sys

import pytest

from audited_runs import import_path

pytestmark = pytest.mark.gpu

PROGRAM = """
import json, logging
import graphkit as gk
from graphkit.graphs.compiles import CompileWatch

logged, one_by_one = [], CompileWatch(lambda _compile: None)
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
logger = logging.getLogger("graphkit")
logger.setLevel(logging.DEBUG)
logger.addHandler(handler)
with gk.models.reference_engine(device="cuda", max_batch_size=8) as engine:
    one_by_one.start()
    engine.capture()
    one_by_one.stop()
    requests = [
        engine.submit([5, 6, 7, i], gk.SamplingParams(max_new_tokens=16, temperature=i % 2, seed=i))
        for i in range(4)
    ]
    while not all(request.is_finished for request in requests):
        engine.step()
    print(json.dumps({
        "text": [request.output_ids for request in requests],
        "compiled": sum(int(text.split()[1]) for text in logged if text.startswith("Compiled ")),
        "failed": [text for text in logged if "compiles kernels failed" in text],
        "waited": [text for text in logged if "waits for its kernels" in text],
        "one by one": [compile.kernel for compile in one_by_one.compiles],
        "late": engine.late_compiles,
    }))
"""


@pytest.mark.slow
def test_a_first_capture_compiles_ahead(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": import_path()}
    cold, warm = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", PROGRAM],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.splitlines()[-1]
        )
        for _ in range(2)
    )
    assert cold["compiled"] > 20 * len(cold["one by one"])
    assert warm["compiled"] == 0
    assert cold["text"] == warm["text"]
    for run in (cold, warm):
        assert not run["failed"]
        assert not run["waited"]
        assert not run["late"]
