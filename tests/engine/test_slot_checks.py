"""KV slots of ``SpecStepRunner``'s requests: too few, outside the pool, or shared."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch

import graphkit as gk
from engine_runs import refuses
from engine_target import CONTEXT, ROWS, SIZES, SPEC, TableForward
from graphkit.engine.step import SpecStepInputs
from graphkit.engine.step.request_state import RequestState
from graphkit.engine.step.slot_checks import SlotChecks

SLOTS, PROMPT, NEW = ROWS * CONTEXT, [1, 2, 3], 9
LEAST = len(PROMPT) + SPEC.num_draft_tokens
NEEDED = LEAST + NEW


def make_runner(device, **options):
    requests = gk.ReqToTokenPool(ROWS, CONTEXT, device)
    pool = gk.MHATokenToKVPool(SLOTS, 1, torch.float32, 1, 1, 1, device)
    kind = gk.TritonAttention if device == "cuda" else gk.SdpaAttention
    runner = gk.SpecStepRunner(
        gk.EngineModel(TableForward(pool, device), kind(requests, pool)),
        gk.NgramDrafter(),
        spec=SPEC,
        sizes=SIZES,
        batch_sizes=[ROWS],
        device=device,
        **options,
    )
    runner.capture()
    return runner


@pytest.fixture(scope="module", params=[False, True], ids=["unchecked", "checked"])
def shared_runner(request, device):
    with make_runner(device, check=request.param) as runner:
        yield runner


@pytest.fixture
def runner(shared_runner):
    shared_runner.spec_step.context.req_to_token.zero_()
    yield shared_runner
    shared_runner.release([1, 2, 3])


def table(runner):
    return runner.spec_step.context.req_to_token


def fill(runner, row, first, length=NEEDED):
    slots = torch.arange(first, first + length, dtype=torch.int32, device=runner.device)
    table(runner)[row, :length] = slots


def admit(runner, row, new=NEW):
    """Admit a request and wait until its slots have been checked."""
    runner.admit(row, PROMPT, max_new_tokens=new)
    if runner.device.type == "cuda":
        torch.cuda.synchronize()
        runner._requests.report()


def text(runner, rows):
    found = {row: [] for row in rows}
    for step in runner.launch(rows, max_steps=2 * NEW):
        for each in step.requests:
            found[each.req_pool_index] += each.tokens
    return found


def expected():
    tokens = PROMPT[-1:]
    for _ in range(NEW):
        tokens.append((5 * tokens[-1] + 3) % 16)
    return tokens[2:]


ENDS = r"\[1, {}\] is slot 0: the row ends too early\. Expected slots from 1 to 288, for the "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.zero_(), ENDS.format(0)),
        (lambda row: row[LEAST - 1 :].zero_(), ENDS.format(LEAST - 1)),
        (lambda row: row[NEEDED - 1 :].fill_(-1), ENDS.replace("slot 0", "slot -1").format(15)),
        (lambda row: row[5:6].fill_(SLOTS + 1), rf"\[1, 5\] is slot {SLOTS + 1}\. Expected slots"),
        (lambda row: row[5:6].fill_(-3), r"\[1, 5\] is slot -3: the row ends too early"),
        (lambda row: row[5:6].fill_(2**31 - 1), r"\[1, 5\] is slot 2147483647\. Expected"),
        (
            lambda row: row[5:6].fill_(103),
            r"req_to_token\[1, \d\] is slot 103, which is also req_to_token\[1, \d\] of a",
        ),
        (
            lambda row: row[7:8].fill_(31),
            r"\[1, 7\] is slot 31, which is also req_to_token\[2, 1\] of a running request",
        ),
    ],
)
def test_admit_refuses_wrong_slots(runner, change, message):
    fill(runner, 2, 30)
    admit(runner, 2)
    fill(runner, 1, 100)
    change(table(runner)[1])
    with refuses(gk.InputError, "req_to_token", message):
        admit(runner, 1)
    fill(runner, 1, 100)
    admit(runner, 1)
    assert text(runner, [1, 2]) == {1: expected(), 2: expected()}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_row_may_get_slots_before_each_launch(runner, steps):
    """As many as its steps can write; those of another request do not move."""
    fill(runner, 2, 200)
    admit(runner, 2)
    fill(runner, 1, 100, LEAST)
    admit(runner, 1)
    tokens, running = [], True
    while running:
        held = len(PROMPT) + len(tokens) + (steps - 1) * runner.max_path + runner.slots_ahead
        fill(runner, 1, 100, min(held, NEEDED))
        for step in runner.launch([1], max_steps=steps):
            for each in step.requests:
                tokens += each.tokens
                running = each.end is gk.RequestEnd.RUNNING
    assert tokens == expected()
    assert text(runner, [2]) == {2: expected()}


def test_a_launch_needs_the_slots_of_all_its_steps(runner):
    fill(runner, 1, 100, LEAST)
    admit(runner, 1)

    def launch():
        list(runner.launch([1], max_steps=2))
        if runner.device.type == "cuda":  # the device reports it later
            torch.cuda.synchronize()
            runner.launch([1], max_steps=1)

    with pytest.raises(gk.InputError, match=ENDS.format(LEAST)):
        launch()
    runner.release([1])
    fill(runner, 1, 100, NEEDED - 1)  # the last step begins before the last token
    admit(runner, 1)
    assert text(runner, [1]) == {1: expected()}
    fill(runner, 1, 100, LEAST)
    admit(runner, 1)
    fill(runner, 2, 200)
    admit(runner, 2)
    table(runner)[1, LEAST] = 203
    with pytest.raises(gk.InputError, match=r"is slot 203, which is also req_to_token\[[12], "):
        launch()


@pytest.mark.parametrize("verb", ["replay", "run", "fall_back"])
def test_a_replay_needs_the_slots_of_one_step(runner, verb):
    """It has them after ``admit``; later ones are checked before they are used."""
    batch = SpecStepInputs(req_pool_indices=torch.tensor([1], device=runner.device))
    fill(runner, 1, 100, LEAST)
    admit(runner, 1)

    def run():
        for _ in range(3):
            getattr(runner, verb)(batch)
            if runner.device.type == "cuda":
                torch.cuda.synchronize()
                runner._requests.report()

    with pytest.raises(gk.InputError, match=r"\[1, \d\] is slot 0: the row ends too early"):
        run()


def test_complete_rows_cost_a_launch_nothing(runner, monkeypatch):
    fill(runner, 1, 100)
    admit(runner, 1)
    monkeypatch.setattr(SlotChecks, "enqueue_launch", lambda *_: 1 / 0)
    assert text(runner, [1]) == {1: expected()}


def test_slots_may_be_used_again(runner):
    """By requests after the end or the release of others; stale entries do not count."""
    fill(runner, 1, 100)
    admit(runner, 1)
    text(runner, [1])
    fill(runner, 2, 100)
    admit(runner, 2)
    runner.release([2])
    fill(runner, 3, 110)
    admit(runner, 3)
    fill(runner, 2, 90, 10)  # later columns still contain slots of row 3
    short = 10 - len(PROMPT) - SPEC.num_draft_tokens
    admit(runner, 2, short)
    fill(runner, 2, 60)
    admit(runner, 2)
    fill(runner, 1, 62)
    with pytest.raises(gk.InputError, match=r"\[1, 0\] is slot 62, which is also .*\[2, 2\]"):
        admit(runner, 1)


@pytest.fixture
def checking_runner(shared_runner, runner):
    if not shared_runner.spec_step.context.is_checking:
        pytest.skip("steps are checked in the checking mode alone")
    return runner


@pytest.mark.parametrize("verb", ["replay", "launch", "run"])
@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (0, r"\[1, 4\] is slot 0: the row ends too early"),
        (35, r"\[1, 4\] is slot 35, which is also req_to_token\[2, 5\] of a running request"),
    ],
)
def test_a_step_reports_the_slots_that_it_writes(checking_runner, verb, slot, message):
    runner = checking_runner
    for row in (1, 2):
        fill(runner, row, {1: 100, 2: 30}[row])
        admit(runner, row)
    table(runner)[1, 4] = slot

    def run():
        if verb == "launch":
            list(runner.launch([1, 2], max_steps=1))
        else:
            rows = torch.tensor([1, 2], device=runner.device)
            getattr(runner, verb)(SpecStepInputs(req_pool_indices=rows))
        if runner.device.type == "cuda":
            torch.cuda.synchronize()

    run()
    with refuses(gk.InputError, "req_to_token", message):
        run()
    runner.release([1, 2])
    fill(runner, 1, 100)
    admit(runner, 1)
    assert text(runner, [1]) == {1: expected()}


def test_the_environment_turns_the_checks_of_steps_on(device, monkeypatch):
    monkeypatch.setenv("GRAPHKIT_CHECK", "1")
    with make_runner(device) as runner:
        fill(runner, 1, 100)
        admit(runner, 1)
        table(runner)[1, 5:] = 0
        list(runner.launch([1], max_steps=1))
        if device == "cuda":
            torch.cuda.synchronize()
        with pytest.raises(gk.InputError, match=r"req_to_token\[1, 5\] is slot 0"):
            runner.launch([1], max_steps=1)


def test_check_is_a_bool(device):
    with refuses(gk.ConfigError, "check", "check must be True, False or None"):
        make_runner(device, check="yes")


def wrong_entries(rows, state, slots_ahead, admitted, length, first, end):
    """Return the entries of a row that are wrong, found by looking at every entry."""
    used = {}
    for row in range(1, len(rows)):
        if row != admitted and state.remaining[row] > 0:
            reach = int(state.seq_lens[row] + state.remaining[row]) + slots_ahead
            used |= {int(slot): (row, column) for column, slot in enumerate(rows[row][:reach])}
    listed = [int(slot) for slot in rows[admitted][:length]]
    return {
        column
        for column, slot in enumerate(listed)
        if not first <= slot < end or slot in used or listed.count(slot) > 1
    }


@pytest.mark.parametrize("seed", range(8))
def test_random_tables_against_a_search(device, seed):
    """Rows come and go at random, many with wrong slots."""
    draw = random.Random(seed)
    context, first, end, ahead, refused = 12, 2, 60, 2, 0
    state = RequestState(5, torch.device(device))
    slots = torch.zeros(6, context, dtype=torch.int32, device=device)
    checks = SlotChecks(state, slots, ahead, first, end, max_path=1)
    for _ in range(120):
        row, length = draw.randint(1, 5), draw.randint(ahead + 2, context)
        state.remaining[row] = 0
        taken = {int(each) for other in range(1, 6) for each in slots[other]}
        free = [slot for slot in range(first, end) if slot not in taken]
        chosen = draw.sample(free, min(length, len(free))) + [0] * (length - len(free))
        if draw.random() < 0.5:
            chosen[draw.randrange(length)] = draw.randint(-1, end + 1)
        slots[row, :length] = torch.tensor(chosen, dtype=torch.int32)
        wrong = wrong_entries(slots, state, ahead, row, length, first, end)
        checks.enqueue_row(row, length, length)
        if device == "cuda":
            torch.cuda.synchronize()
        if wrong:
            refused += 1
            with pytest.raises(gk.InputError) as caught:
                checks.report()
            assert any(f"req_to_token[{row}, {column}] is" in str(caught.value) for column in wrong)
            continue
        checks.report()
        done = draw.randint(1, length - ahead - 1)
        state.seq_lens[row], state.remaining[row] = done, length - ahead - done
    assert 20 < refused < 100


def replay(runner, rows):
    return runner.replay(SpecStepInputs(req_pool_indices=torch.tensor(rows)))


@pytest.mark.parametrize("run", [replay, text])
@pytest.mark.parametrize("slot", [SLOTS + 1, -3])
def test_a_slot_outside_the_pool_that_is_set_after_admit_fails_the_step(device, slot, run):
    if device == "cuda":
        pytest.skip("CUDA reads and writes other memory")
    runner = make_runner(device, check=True)
    fill(runner, 1, 100)
    admit(runner, 1)
    table(runner)[1, 5] = slot
    with pytest.raises(gk.ReplayError, match=rf"raised IndexError: .*index {slot} is out of"):
        run(runner, [1])
    with pytest.raises(gk.InputError, match=rf"\[1, 5\] is slot {slot}"):
        run(runner, [1])
    with suppress(gk.ReplayError):  # of the loop that has failed
        runner.close()
