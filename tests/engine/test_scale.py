"""The host's work in a step does not grow with the slots of the pool, nor with past requests."""

from __future__ import annotations

import sys
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
import torch

import graphkit as gk
from engine_target import ROWS, SPEC, VOCAB, TableForward
from graphkit.engine.kv import ReqToTokenPool, TokenSlotAllocator

SMALL, LARGE, CONTEXT, NEW = 16_384, 1_000_000, 96, 8
NOISE = 64 * 1024
"""Bytes by which two runs of the same work may differ."""
PACKAGE = str(Path(gk.__file__).parent)


class Work:
    """Counts the bytecode instructions that graphkit runs in a block, and its largest memory.

    A loop in Python shows in the instructions, and a set, list or dict in the memory.
    """

    def __enter__(self):
        self.instructions = 0
        tracemalloc.start()
        tracemalloc.reset_peak()
        self._before = tracemalloc.get_traced_memory()[0]
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        self.memory = tracemalloc.get_traced_memory()[1] - self._before
        tracemalloc.stop()

    def _trace(self, frame, event, _value):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.instructions += event == "opcode"
        return self._trace


def work_of_steps(slots, generation, past_requests, waiting=0):
    """Run requests in waves, so that rows and slots are freed and allocated again."""
    requests = ReqToTokenPool(ROWS, CONTEXT, "cpu")
    pool = gk.MHATokenToKVPool(slots, 1, torch.float32, 1, 1, 1, "cpu")
    with gk.SpeculativeEngine(
        gk.EngineModel(TableForward(pool, "cpu"), gk.SdpaAttention(requests, pool)),
        gk.NgramDrafter(),
        spec=SPEC,
        sizes=gk.BufferSizes(ROWS, CONTEXT, 1, VOCAB, torch.float32),
        batch_sizes=[ROWS],
        device="cpu",
        generation=generation,
        steps_per_launch=4,
    ) as engine:
        engine.capture()
        sampling = gk.SamplingParams(max_new_tokens=NEW)
        engine.generate([[1, 2]] * ROWS, sampling)
        for _ in range(past_requests):
            engine.generate([[1]], gk.SamplingParams(max_new_tokens=1))
        requests = [engine.submit(each, sampling) for each in ([3, 4, 5], [6], [7, 8], [9, 10])]
        for _ in range(waiting):
            engine.submit([1, 2], sampling)
        with Work() as work:
            while not all(request.is_finished for request in requests[:ROWS]):
                engine.step()
            engine.abort(engine.submit([5]))
        return work


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_a_step_does_no_more_work_with_more_slots_and_past_requests(generation):
    few, many = work_of_steps(SMALL, generation, 0), work_of_steps(LARGE, generation, 60)
    assert few.instructions > 1000
    assert many.instructions < 1.01 * few.instructions, "loops of v3 wait for different times"
    assert many.memory < few.memory + NOISE


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v1", "v2", "v3"])
def test_a_step_does_no_more_work_with_more_waiting_requests(generation):
    few, many = (work_of_steps(SMALL, generation, 0, waiting) for waiting in (10, 2000))
    assert many.instructions < 1.01 * few.instructions
    assert many.memory < few.memory + NOISE


def allocate_and_free(make):
    """Return the work of a call that frees one of many, and of ``make`` itself."""
    with Work() as making:
        pool = make()
    kept, freed = pool.alloc(8), pool.alloc(1)
    with Work() as work:
        pool.free(freed)
        pool.alloc(1)
    pool.free(kept)
    return work, making


@pytest.mark.parametrize(
    "make",
    [TokenSlotAllocator, lambda size: ReqToTokenPool(size, 1, "cpu")],
    ids=["slots", "rows"],
)
def test_a_pool_does_no_more_work_with_more_slots(make):
    # The least of three: other threads of the process, such as that of pytest-xdist, allocate, too.
    small, large = ([allocate_and_free(partial(make, n)) for _ in range(3)] for n in (SMALL, LARGE))
    assert {work.instructions for work, _ in small + large} == {small[0][0].instructions}
    assert small[0][0].instructions > 10
    least_small, least_large = (min(work.memory for work, _ in runs) for runs in (small, large))
    assert least_large < least_small + 1024
    least_making = min(making.memory for _, making in large)
    assert least_making < 2 * LARGE, "a list of ints needs eight bytes for each"


def test_the_slots_of_a_long_prompt_take_few_instructions_of_python():
    """An engine allocates and frees them between two steps of all other requests."""
    pool, count = TokenSlotAllocator(LARGE), 4096
    with Work() as work:
        pool.free(pool.alloc(count).tolist())
    assert work.instructions < 16 * count
