"""``tools/bench/first_request.py`` on the CPU: what a process answers, and the report of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch


@pytest.mark.slow
def test_a_process_captures_and_waits_before_its_requests(bench, monkeypatch, capsys):
    threads = torch.get_num_threads()
    seen = []
    waiting = io.StringIO("go\n")
    monkeypatch.setattr(bench.sys, "stdin", waiting)
    monkeypatch.setattr(bench, "REQUESTS", 2)
    for kind, (length, sampling) in bench.KINDS.items():
        monkeypatch.setitem(bench.KINDS, kind, (length, replace(sampling, max_new_tokens=3)))
    reference_engine = bench.reference_engine

    def noted(*arguments, **options):
        engine = reference_engine(*arguments, **options)
        generate = engine.generate

        def generated(prompts, sampling):
            seen.append((waiting.tell(), sampling.temperature, tuple(prompts[0])))
            return generate(prompts, sampling)

        engine.generate = generated
        return engine

    monkeypatch.setattr(bench, "reference_engine", noted)
    bench.serve("v1", torch.device("cpu"))
    torch.set_num_threads(threads)
    captured, answer = capsys.readouterr().out.splitlines()
    assert captured == "captured"
    found = json.loads(answer)
    assert {kind: len(each["ms"]) for kind, each in found.items()} == dict.fromkeys(bench.KINDS, 2)
    assert [(start, temperature, len(prompt)) for start, temperature, prompt in seen] == [
        (3, sampling.temperature, length) for length, sampling in bench.KINDS.values() for _ in "12"
    ]
    assert len({prompt for *_, prompt in seen}) == 3, "each length has one prompt"


def test_the_first_request_is_judged_by_the_second(bench):
    requests = {"ms": [30.0, 10.0, 20.0], "kernels": [2, 0, 0]}
    measures = list(bench.measures({"v2": {"greedy": requests}}))
    judged = [each for each in measures if each.bar is not None]
    assert [(each.name, each.value, each.bar) for each in judged] == [
        ("v2, greedy: first over second request", 3.0, 2.0)
    ]
    assert [each.value for each in measures if each.name == "compiled kernels"] == [2, 0, 0]


def test_a_process_that_fails_is_an_error(bench, monkeypatch):
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="v1 ended with code 1"):
        bench.answers(torch.device("cpu"), ["v1"])
