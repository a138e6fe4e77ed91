"""An exception at any line of a step loses no token, row, slot or entry."""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from graphkit.engine import SamplingParams
from interruptions import Line, is_device, lines_of, raising_at

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "tools" / "bench"
PROMPTS = [[5], [7, 1, 4, 2, 8, 3], [9, 9], [3, 2, 8, 6]]
COUNTS = [3, 1, 4, 2]


@pytest.fixture(scope="module")
def table_model():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("table_model")


class Service:
    """Requests of which some join while others run, in an engine that may raise at any line."""

    def __init__(self, engine, table):
        self.engine = engine
        self.texts = [table.text(p, n, ()) for p, n in zip(PROMPTS, COUNTS, strict=True)]
        self.requests, self.returned = [], {}

    def submit(self, *indices):
        for index in indices:
            sampling = SamplingParams(max_new_tokens=COUNTS[index])
            self.requests.append(self.engine.submit(PROMPTS[index], sampling))

    def step(self):
        for request, tokens in self.engine.step():
            self.returned.setdefault(request, []).extend(tokens)

    def run(self):
        """Run until all requests have ended."""
        self.requests, self.returned = [], {}
        self.submit(0, 1, 2)
        self.step()
        self.submit(3)
        self.finish()

    def finish(self):
        for _ in range(60):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine has work after 60 steps")

    def check(self):
        """Compare every text, and look for what the engine holds although nothing runs."""
        for request, text in zip(self.requests, self.texts, strict=False):
            assert request.output_ids == text
            assert request.row == 0
            # Tokens of a call that was interrupted while it returned are in output_ids alone.
            returned = self.returned.get(request, [])
            lost = len(text) - len(returned)
            assert any(text[:i] + text[i + lost :] == returned for i in range(len(text) + 1))
        memory = self.engine.memory
        assert memory.held_slots == 0
        assert memory.available_rows == memory.pool.size
        for runner in self.engine.runners:
            mailbox = runner.buffers.mailbox
            assert mailbox.sequence == mailbox.ring[0] or mailbox._posted == mailbox.sequence


@pytest.fixture(scope="module", params=["v1", "v2", "v3"])
def service(request, table_model):
    table = table_model.Table(torch.device("cpu"))
    engine = table_model.table_engine(
        table,
        2,
        max_batch_size=3,
        batch_sizes=[1, 3],
        generation=request.param,
        steps_per_launch=3,
        chunked_prefill_size=4,
    )
    with engine:
        engine.capture()
        yield Service(engine, table)


def is_own(line):
    """Return whether a line is not shared by all generations."""
    return "/engine/" in line.code.co_filename or "/step/" in line.code.co_filename


def test_an_interrupt_at_any_line(service):
    """Lines below the engine take turns, since all generations run them."""
    service.run()
    counts = lines_of(service.run)
    service.check()
    turn = int(service.engine.generation[1:])
    chosen = [line for i, line in enumerate(counts) if is_own(line) or i % 3 == turn % 3]
    assert len(chosen) > 200
    for i, line in enumerate(chosen):
        interrupt(service, line, 1 + i * 7 % counts[line])


def interrupt(service, line, occurrence, again=None):
    """Interrupt a run at a line, perhaps the next step at another line, and check what follows."""
    with raising_at(line, occurrence, KeyboardInterrupt()) as was_raised:
        try:
            service.run()
        except KeyboardInterrupt:
            pass
        else:
            assert not was_raised(), f"{line} swallows an interrupt"
    try:
        if again is not None:
            with raising_at(again, 1, KeyboardInterrupt()), suppress(KeyboardInterrupt):
                service.finish()
        service.finish()
        service.check()
    except BaseException as error:
        error.add_note(f"after interrupts at {line}, occurrence {occurrence}, and {again}")
        raise


def test_an_interrupt_within_a_recorded_loop(service):
    """The host runs the loops of the recorder, and stops in the middle of an operation."""
    if service.engine.generation != "v3":
        pytest.skip("only v3 has loops")
    service.run()
    counts = lines_of(service.run, is_device)
    assert any("/ops/device_loop.py" in line.code.co_filename for line in counts)
    assert any("/graphs/recorded_loop.py" in line.code.co_filename for line in counts)
    for i, line in enumerate(counts):
        interrupt(service, line, 1 + i * 7 % counts[line])


RECOVERY = "_restart", "reset", "requeue", "resume", "free_all", "end", "drop_finished"


def test_an_interrupt_while_the_next_step_recovers_from_one(service):
    """The first one comes while the host removes requests that have ended."""
    service.run()
    ends = lines_of(service.run, lambda code: code.co_qualname == "Tally.end")
    first = min(ends, key=lambda line: (ends[line], line.number))  # within the loop
    lines = lines_of(
        lambda: interrupt(service, first, 1),
        lambda code: is_own(Line(code, 0)) and code.co_name in RECOVERY,
    )
    assert {line.code.co_name for line in lines} == {*RECOVERY}
    for line in lines:
        for occurrence in (1, 2):
            interrupt(service, first, occurrence, line)
            texts = [service.returned.get(request) for request in service.requests]
            assert texts == service.texts[: len(texts)], f"{line} loses tokens"


def test_a_loop_of_a_caller_goes_on_after_an_interrupt(table_model):
    """It is stopped, and its requests are admitted again with the text that was received."""
    table, count = table_model.Table(torch.device("cpu")), 5
    prompts = dict(enumerate(PROMPTS[:2], 1))
    texts = {row: table.text(prompt, count, ()) for row, prompt in prompts.items()}

    def run(runner):
        received, running = {row: [] for row in prompts}, set(prompts)

        def take(row, tokens):
            received[row] += tokens
            if len(received[row]) == count:
                running.discard(row)

        def advance(is_first):
            if is_first:
                runner.release(sorted(running))
                for row in sorted(running):
                    sampling = SamplingParams(max_new_tokens=count - len(received[row]))
                    report = runner.admit(row, prompts[row] + received[row], sampling)
                    take(row, report[0, 5 : 5 + int(report[0, 2])].tolist())
            for step in runner.launch(sorted(running), max_steps=3) if running else ():
                for each in step.requests:
                    take(each.req_pool_index, each.tokens)

        is_first = True
        for _ in range(60):
            if not running:
                break
            try:
                advance(is_first)
                is_first = False
            except KeyboardInterrupt:
                runner.stop_loops()
                is_first = True
        assert not running, "requests run after 60 launches"
        return received

    with table_model.table_runner(table, 1, rows=2, batch_sizes=[1, 2], ring_entries=8) as runner:
        runner.capture()
        assert run(runner) == texts
        loops = "/ops/device_loop.py", "/graphs/recorded_loop.py"
        lines = lines_of(lambda: run(runner), lambda code: code.co_filename.endswith(loops))
        assert len(lines) > 60
        for line in lines:
            with raising_at(line, 1 + lines[line] // 2, KeyboardInterrupt()):
                assert run(runner) == texts, line
