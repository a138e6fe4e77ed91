"""Scenarios of several ranks. Every rank runs every function; see ``rank_processes``."""

from __future__ import annotations

import gc
import random
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import graphkit as gk
from claimed_attention import SIZES as ATTENTION_SIZES, TREE, IgnoresMask, Right, model_of
from draft_choices import choices_of, force_variant
from engine_target import CONTEXT, ROWS, SIZES as TABLE_SIZES, SPEC as TABLE_SPEC, TableForward
from graphkit.models.reference import reference_target
from rank_processes import die
from rank_steps import (
    LARGEST,
    SPEC,
    WIDTH,
    batch,
    captured,
    check,
    rank_device,
    rank_group,
    runner,
    step,
)

SHORT = 15.0
"""Time limit of groups in which a rank does not arrive, in seconds.

A rank of a busy machine must arrive within it: a process that shares two cores with others may
pause for seconds.
"""
NOT_ARRIVED = f"rank 1 did not arrive within {SHORT:g} s"


class Split:
    """A layer whose logits are the mean of those of all ranks."""

    def __init__(self, kind):
        self.model = model_of(kind)
        self.attention = self.model.attention

    def __call__(self, inputs):
        logits = self.model.forward(inputs).next_token_logits
        dist.all_reduce(logits)
        return gk.ForwardOutput(next_token_logits=logits / dist.get_world_size())


def compare_attention():
    """Attention that ignores masks on one rank, or on all, is refused by all before a capture."""
    group, rank = rank_group(), dist.get_rank()
    options = {"spec": TREE, "sizes": ATTENTION_SIZES, "batch_sizes": [2], "group": group}
    options["device"] = "cpu"

    def runner_of(kind):
        forward = Split(kind)
        return gk.TargetVerifyRunner(forward, attention=forward.attention, **options)

    with runner_of(Right) as right:
        right.capture()
    with runner_of(IgnoresMask) as wrong:
        raises(gk.AttentionError, wrong.capture, "IgnoresMask supports TARGET_VERIFY", "a tree")
    # The ranks compute other logits each.
    forward = model_of(IgnoresMask if rank else Right)
    with gk.TargetVerifyRunner(forward.forward, attention=forward.attention, **options) as one:
        raises(gk.AttentionError, one.capture, "supports TARGET_VERIFY" if rank else "another rank")
    for generation in ("v1", "v3"):
        forward = Split(IgnoresMask)
        with gk.SpeculativeEngine(
            gk.EngineModel(forward, forward.attention), gk.NgramDrafter(), generation=generation,
            **options | {"group": rank_group(same_batch=True)},
        ) as engine:  # fmt: skip
            engine.submit([1, 2, 3])
            call = engine.capture if generation == "v3" else engine.step
            raises(gk.AttentionError, call, "IgnoresMask supports TARGET_VERIFY")


def raises(error, call, *words):
    """Call, and return the error that it must raise, with all words in its text."""
    with pytest.raises(error) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"
    return caught.value


def is_rank(rank):
    return dist.get_rank() == rank


# Agreement.


def agree_on_random_steps():
    """Steps of two modes: ranks are idle, have unequal batches, or cannot replay."""
    group = rank_group()
    # A step of gloo takes many times as long, most of all with four ranks.
    steps = 10_000 if rank_device().type == "cuda" else {2: 1000, 4: 250}[group.size]
    runners = {width: captured(group, width=width) for width in (1, WIDTH)}
    rank = dist.get_rank()
    draw, own = random.Random(7), random.Random(rank)
    fallbacks, idle, replays = 0, 0, 0
    for mark in range(steps):
        width, batches = draw.choice([1, WIDTH]), [0] * group.size
        for each in range(group.size):
            batches[each] = draw.choice([0, 0, 1, 2, 3, LARGEST, LARGEST + 1])
            if draw.random() < 0.8:  # most steps have no batch that is too large
                batches[each] = min(batches[each], LARGEST)
        requests, chosen = batches[rank], runners[width]
        is_eager = max(batches) > LARGEST
        size = next((size for size in (0, 1, 2, LARGEST) if size >= max(batches)), None)
        if not requests and own.random() < 0.5:
            mode = group.idle()
            assert mode is (chosen.mode if max(batches) else gk.ForwardMode.IDLE)
        else:
            output = chosen.run(batch(requests, width=width, mark=mark))
            rows = sum(max(each, 1) for each in batches) if is_eager else size * group.size
            if requests:
                check(output, requests, rows * width, width=width, mark=mark)
            assert len(output.next_token_logits) == requests * width
        assert group.agreed_size.batch_sizes == tuple(batches)
        assert group.agreed_size.padded_batch_size == (0 if is_eager else size)
        fallbacks += is_eager and requests > 0
        idle += requests == 0 and max(batches) > 0
        replays += not is_eager and max(batches) > 0
    stats = [each.stats for each in runners.values()]
    assert sum(sum(each.fallbacks.values()) for each in stats) == fallbacks > 0
    assert sum(each.idle for each in stats) == idle > steps / 10
    assert sum(each.replays for each in stats) == replays > steps / 2
    for each in runners.values():
        each.close()


def agree_on_staged_batches():
    """A staged batch runs at the size of the rank with the most requests."""
    group = rank_group()
    verify = captured(group)
    for requests in ((1, 4), (2, 1)):
        live, rows = requests[dist.get_rank() % 2], 2 * group.size
        staged = verify.stage(live)
        for name, values in vars(batch(live, mark=3)).items():
            if values is not None:
                setattr(staged, name, values)
        check(staged.replay(), live, max(requests) * rows, mark=3)
    assert verify.stats.agreements == 2
    verify.close()


def refuse_a_batch():
    """A batch that one rank refuses is an error on all, and the next step runs."""
    group = rank_group()
    verify = captured(group)
    wrong = {"positions": torch.zeros(3)} if is_rank(1) else {}
    for call in (verify.run, verify.replay):
        error = gk.InputError if is_rank(1) else gk.RankError
        found = raises(error, lambda call=call: call(batch(2, **wrong)), "positions")
        assert is_rank(1) or found.ranks == (1,)
    check(verify.run(batch(1)), 1, WIDTH * group.size)
    verify.close()


def fall_back_together():
    """``replay`` names the rank that cannot; ``run`` falls back on all and counts why."""
    group = rank_group()
    verify = captured(group)
    mine = batch(LARGEST + 1 if is_rank(1) else 1)
    found = raises(gk.RankError, lambda: verify.replay(mine), "batch too large", "run(batch)")
    assert found.ranks == (1,)
    rows = (LARGEST + group.size) * WIDTH
    check(verify.run(mine), mine.batch_size, rows)
    reason = "batch too large" if is_rank(1) else "rank 1: batch too large"
    assert verify.stats.fallbacks == {reason: 1}
    verify.close()


def run_different_modes():
    """Ranks that run different modes raise an error, and may run the next step."""
    group = rank_group()
    runners = [captured(group), captured(group, width=1)]
    chosen, width = (runners[1], 1) if is_rank(1) else (runners[0], WIDTH)
    mine = batch(1, width=width)
    raises(gk.RankError, lambda: chosen.run(mine), "TARGET_VERIFY", "DECODE", "rank 1")
    check(runners[0].run(batch(1)), 1, WIDTH * group.size)
    for each in runners:
        each.close()


def check_the_same_batch():
    """Ranks with ``same_batch`` agree in the checking mode only."""
    group = rank_group(same_batch=True)
    verify, checked = captured(group), captured(group, check=True)
    check(verify.replay(batch(2)), 2, 2 * WIDTH * group.size)
    assert verify.stats.agreements == 0
    check(checked.replay(batch(2)), 2, 2 * WIDTH * group.size)
    assert checked.stats.agreements == 1
    mine = batch(2 if is_rank(1) else 1)
    raises(gk.RankError, lambda: checked.replay(mine), "same_batch", "2 requests", "1 requests")
    raises(gk.ReplayError, group.idle, "same_batch")
    verify.close()
    checked.close()


# Capture.


def shared(forward):
    """Return a forward, or several, whose outputs are right only if all ranks run it."""
    if isinstance(forward, (list, tuple)):
        return [shared(each) for each in forward]

    def run(inputs):
        output, present = forward(inputs), torch.ones(1)
        dist.all_reduce(present)
        for tensor in output.tensors().values():
            if tensor.is_floating_point():
                tensor.mul_(present / dist.get_world_size())
        return output

    return run


def capture_every_mode():
    """Every mode captures and replays with collectives inside, an idle rank with pads."""
    group, plain = rank_group(), reference_target(max_batch_size=2)
    forwards = {mode: shared(forward) for mode, forward in plain.forwards.items()}
    target = replace(plain, forwards=forwards, group=group)
    for mode in forwards:
        expected = plain.runner(mode, batch_sizes=[1, 2])
        made = target.runner(mode, batch_sizes=[1, 2])
        record = made.capture()
        assert [size.batch_size for size in record.modes[0].sizes] == [1, 2]
        requests = 2 if is_rank(0) else 1
        mine = target.batch(mode, requests, 3)
        got, want = made.replay(mine), expected.run_padded(mine, padded_batch_size=2)
        for name, tensor in want.tensors().items():
            torch.testing.assert_close(getattr(got, name), tensor)
        if is_rank(0):
            made.replay(mine)
        else:
            assert group.idle() is mode
        assert made.stats.replays_by_size == {2: 2}
        made.close()


class CompilingBackend(gk.RecorderBackend):
    compiles_kernels = True


def compile_kernels_of_one_rank():
    """A rank that has all kernels runs the same functions as one that compiles some."""
    group, runs = rank_group(), []

    def forward(inputs):
        runs.append(inputs.batch_size)
        return step(inputs)

    for compiled in ({"kernel"} if is_rank(0) else set(), set()):
        with pytest.MonkeyPatch.context() as patch:
            path = "graphkit.graphs.compiles._compiling"
            patch.setattr(path, lambda *_, keys=compiled: nullcontext(keys))
            captured(group, forward, backend=CompilingBackend())
        counted = [None] * group.size
        dist.all_gather_object(counted, runs)
        assert counted[0] == counted[1]
    sizes = [4, 4, 2, 2, 1, 1]  # a warm-up and a capture each
    assert runs == [4, 2, 1, *sizes, 4, *sizes]
    runs.clear()

    def failing(inputs):
        runs.append(inputs.batch_size)
        if is_rank(1):
            raise ValueError("no weights on this rank")
        return gk.ForwardOutput(next_token_logits=torch.zeros(inputs.num_tokens, 8))

    capture = runner(group, failing, backend=CompilingBackend()).capture
    raises(gk.CaptureError, capture, "on rank 1", "no weights")
    assert len(runs) == 1, "NCCL ends the group with the first failure"


class SharedTable(TableForward):
    """A table whose logits are the mean of all ranks'."""

    def __call__(self, inputs):
        output = super().__call__(inputs)
        dist.all_reduce(output.next_token_logits.div_(dist.get_world_size()))
        return output


def spec_step(group, forward):
    """Return a captured runner of a whole step, and the reports of a request's steps."""
    requests = gk.ReqToTokenPool(ROWS, CONTEXT, torch.device("cpu"))
    pool = gk.MHATokenToKVPool(ROWS * CONTEXT, 1, torch.float32, 1, 1, 1, torch.device("cpu"))
    model = gk.EngineModel(forward(pool, "cpu"), gk.SdpaAttention(requests, pool))
    made = gk.SpecStepRunner(
        model, gk.NgramDrafter(), spec=TABLE_SPEC, sizes=TABLE_SIZES, batch_sizes=[1, 2],
        device="cpu", group=group,
    )  # fmt: skip
    made.capture()
    (row,) = requests.alloc(1)
    requests.req_to_token[row] = torch.arange(1, CONTEXT + 1)
    reports = [made.admit(row, [1, 2, 3], max_new_tokens=40)]
    steps = gk.SpecStepInputs(req_pool_indices=torch.tensor([row]))
    reports += [made.replay(steps, clone=True).report for _ in range(5)]
    return made, [each.tolist() for each in reports]


def step_together():
    """The whole step is captured on all ranks, and gives the tokens of one rank."""
    group = rank_group(same_batch=True)
    alone, expected = spec_step(None, TableForward)
    alone.close()
    made, got = spec_step(group, SharedTable)
    assert got == expected
    assert made.stats.replays == 5
    made.close()
    separate, _ = spec_step(rank_group(), SharedTable)
    raises(gk.ReplayError, lambda: separate.launch([1], max_steps=4), "batches of their own")
    separate.close()


def preempting_engine(group, generation, num_steps):
    """Return an engine of the table whose pool is too small for its requests."""
    requests = gk.ReqToTokenPool(ROWS, CONTEXT, torch.device("cpu"))
    pool = gk.MHATokenToKVPool(70, 1, torch.float32, 1, 1, 1, torch.device("cpu"))
    forward = TableForward if group is None else SharedTable
    model = gk.EngineModel(forward(pool, "cpu"), gk.SdpaAttention(requests, pool))
    return gk.SpeculativeEngine(
        model, gk.NgramDrafter(), spec=gk.SpecConfig("NGRAM", num_steps, 1, 4),
        sizes=TABLE_SIZES, batch_sizes=[1, 2], device="cpu", group=group, generation=generation,
        steps_per_launch=2, chunked_prefill_size=8,
    )  # fmt: skip


def assert_same_on_all_ranks(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert found == found[:1] * len(found)


def served(engine, random):
    """Return the texts of requests that join at random, and what the engine counted."""
    with engine:
        engine.capture()
        waiting = [
            (
                [1 + i, 2, 3, 4 + i],
                gk.SamplingParams(max_new_tokens=20 + i, temperature=i % 2, seed=i),
            )
            for i in range(6)
        ]
        requests = []
        while waiting or engine.has_work:
            joining = min(len(waiting), random.randint(0, 2))
            requests += [engine.submit(*waiting.pop()) for _ in range(joining)]
            if engine.spec.is_adaptive:  # the next step, or launch, runs another length
                force_variant(engine, random.randrange(choices_of(engine).times.shape[1]))
            engine.step()
            lengths = engine.stats.drafted_lengths
        assert engine.memory.held_slots == 0
        return [each.output_ids for each in requests], lengths, engine.stats.preemptions


def preempt_and_adapt_together():
    """Ranks preempt the same requests, and run the same draft lengths; no text changes."""
    expected, _, _ = served(preempting_engine(None, "v2", 3), random.Random(3))
    for generation in ("v1", "v2", "v3"):
        group = rank_group(same_batch=True)
        engine = preempting_engine(group, generation, (0, 1, 3))
        texts, lengths, preemptions = served(engine, random.Random(3))
        assert texts == expected, generation
        assert preemptions > 0
        assert len(lengths) > 1, "the length adapts"
        assert_same_on_all_ranks((lengths, preemptions))


def choose_lengths_by_the_same_times():
    """Ranks take the times of rank 0, and refuse v3 where it would run one length alone."""
    with pytest.MonkeyPatch.context() as patch:
        measured = gk.RecorderBackend.measure
        slower = 1 + dist.get_rank()
        patch.setattr(gk.RecorderBackend, "measure", lambda *args: slower * measured(*args))
        for generation in ("v1", "v2", "v3"):
            engine = preempting_engine(rank_group(same_batch=True), generation, (0, 1, 3))
            with engine:
                engine.capture()
                times = choices_of(engine).times
                assert (times > 1).all()
                assert_same_on_all_ranks(times.tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gk.RankGroup, "no_loop_reason", "the collectives do not run in loops")
        group = rank_group(same_batch=True)
        found = raises(
            gk.ConfigError,
            lambda: preempting_engine(group, "v3", (0, 1, 3)),
            "do not run in loops",
            "without loops, v3 runs the longest of several draft lengths",
        )
        assert found.field == "generation"
        with preempting_engine(group, None, (0, 1, 3)) as adaptive:
            assert adaptive.generation == "v2"
        with preempting_engine(group, None, 3) as fixed:
            assert fixed.generation == "v3"


def estimate_together():
    """Ranks predict the memory of their graphs together, and capture afterwards."""
    for generation in ("v2", "v3"):
        with preempting_engine(rank_group(same_batch=True), generation, (0, 1, 3)) as engine:
            before = engine.estimate()
            engine.capture()
            after = engine.estimate()
            assert 0.97 < before.graph_pools / after.graph_pools < 1.03
            assert_same_on_all_ranks(before.to_dict())


def disagree_on_settings():
    """Settings that differ are named on all ranks, and other runners can be captured."""
    group = rank_group()
    sizes = [1, LARGEST] if is_rank(1) else [1, 2, LARGEST]
    other = replace(SPEC, page_size=2) if is_rank(1) else SPEC
    for field, options in {"batch_sizes": {"batch_sizes": sizes}, "spec": {"spec": other}}.items():
        made = runner(group, **options)
        found = raises(gk.ConfigError, made.capture, f"disagree on {field}", "rank 1")
        assert found.field == field
        assert made.status == "planned"
    width = 1 if is_rank(1) else WIDTH
    raises(gk.ConfigError, runner(group, width=width).capture, "DECODE", "TARGET_VERIFY")
    captured(group).close()


def fail_a_capture():
    """A capture that one rank refuses fails on all, and all may capture again."""
    group = rank_group()

    def reading(inputs):
        output = step(inputs)
        if is_rank(1) and inputs.batch_size == 2 and failing:
            output.next_token_logits.sum().item()
        return output

    failing = True
    made = runner(group, reading)
    found = raises(gk.CaptureError, made.capture, "on rank 1", "TARGET_VERIFY at batch size 2")
    assert (found.rank, found.cause) == (1, gk.CaptureCause.HOST_SYNCHRONISATION)
    assert found.batch_size == 2
    assert made.status == "planned"
    failing = False
    made.capture()
    check(made.run(batch(2)), 2, 2 * WIDTH * group.size)
    made.close()


def fail_before_a_collective():
    """Ranks that wait in a collective for a rank that failed raise its cause, not their own."""
    # A gloo collective ends by its own limit; one of NCCL is aborted.
    is_gloo = dist.get_backend() == "gloo"
    short = dist.new_group(timeout=timedelta(seconds=SHORT)) if is_gloo else None
    group = rank_group(short)

    def failing(inputs):
        if is_rank(1):
            raise ValueError("no weights on this rank")
        return step(inputs, short)

    found = raises(gk.CaptureError, runner(group, failing).capture, "on rank 1", "no weights")
    assert (found.rank, found.cause) == (1, gk.CaptureCause.FORWARD_ERROR)


def fail_outside_the_forward():
    """An error between two captures of one rank ends those of all."""
    group = rank_group()

    def progress(record):
        if is_rank(1) and record.batch_size == 2:
            raise OSError("disk full")

    made = runner(group)
    error = OSError if is_rank(1) else gk.CaptureError
    raises(error, lambda: made.capture(progress), "disk full")
    assert made.status == "planned"


def capture_without_a_rank():
    """A rank that does not capture is named after the time limit."""
    group = rank_group(time_limit=SHORT)
    made = runner(group)
    if is_rank(1):
        wait_until_lost(group)
        raises(gk.RankError, made.capture, "this rank arrived", NOT_ARRIVED)
        return
    found = raises(gk.CaptureError, made.capture, NOT_ARRIVED)
    assert (found.rank, found.cause) == (1, gk.CaptureCause.MISSING_RANK)
    raises(gk.GraphkitError, made.capture, "rank 1")


# The end.


def close_in_the_wrong_order():
    """A runner whose process group was destroyed raises an error, and is closed."""
    group = rank_group()
    verify = captured(group)
    dist.destroy_process_group()
    raises(gk.ReplayError, lambda: verify.replay(batch(1)), "destroy_process_group")
    raises(gk.ReplayError, verify.close, "before", "destroy_process_group")
    assert verify.status == "closed"
    verify.close()


def alone(inputs):
    """Return token ids as logits, without a collective."""
    return gk.ForwardOutput(next_token_logits=inputs.input_ids[:, None].float().repeat(1, 8))


def close_after_unequal_replays():
    """Replays that other ranks do not have are found at the end."""
    group = rank_group(same_batch=True)
    verify = captured(group, alone)
    for _ in range(3 if is_rank(1) else 2):
        verify.replay(batch(1))
    raises(gk.RankError, verify.close, "replays", "rank 0 has 2", "rank 1 has 3")
    assert verify.status == "closed"


def close_too_early():
    """A rank that closes while others replay ends both with an error."""
    group = rank_group()
    verify = captured(group)
    verify.run(batch(1))
    call = verify.close if is_rank(1) else lambda: verify.run(batch(1))
    found = raises(gk.RankError, call, "rank 1 closed TARGET_VERIFY after 1 replays")
    assert found.ranks == (1, 0)
    raises(gk.RankError, lambda: captured(group), "rank 1 closed")
    verify.close()  # without waiting: the ranks do not agree after a failure


def leave_with_an_error():
    """An exception in the block of a runner on one rank is an error on the others."""
    group = rank_group()

    def work():
        with captured(group) as verify:
            verify.run(batch(1))
            if is_rank(1):
                raise LookupError("no such request")
            verify.run(batch(1))

    error = LookupError if is_rank(1) else gk.RankError
    raises(error, work, "no such request")


def leave_without_a_collective():
    """A rank that leaves starts no collective: it would wait for the others."""
    group = rank_group(same_batch=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *_, **__: pytest.fail("a collective"))
        group.leave(LookupError("no such request"))
    assert group.is_lost


def wait_until_lost(group):
    """Wait as a rank does that waits for its device: outside of any call."""
    deadline = time.monotonic() + 4 * SHORT
    while not group.is_lost and time.monotonic() < deadline:
        time.sleep(0.05)


def arrive_late_without_an_agreement():
    """The heartbeat reports a rank that does not begin a replay of the others."""
    group = rank_group(time_limit=SHORT, same_batch=True)
    verify = captured(group, alone)
    for _ in range(1 if is_rank(1) else 2):
        verify.replay(batch(1))
    wait_until_lost(group)
    late = "this rank arrived" if is_rank(1) else "rank 1"
    raises(gk.RankError, lambda: verify.replay(batch(1)), late, NOT_ARRIVED)


def arrive_late_after_an_agreement():
    """The heartbeat reports a rank that does not launch the replay that all ranks agreed on."""
    group = rank_group(time_limit=SHORT)
    verify = captured(group, alone)

    def launch_late(launch):
        wait_until_lost(group)
        return launch()

    if is_rank(1):
        with verify.observe(launch_late):
            raises(gk.RankError, lambda: verify.replay(batch(1)), "this rank arrived")
        return
    verify.replay(batch(1))
    wait_until_lost(group)
    raises(gk.RankError, lambda: verify.replay(batch(1)), NOT_ARRIVED)


def idle_without_an_agreement():
    """Ranks that made the same calls, or dropped their group, may be idle beyond the time limit."""
    groups = [rank_group(time_limit=SHORT, same_batch=True) for _ in range(2)]
    verify = captured(groups[0], alone)
    verify.replay(batch(1))
    if is_rank(1):
        groups.pop()
        gc.collect()
    time.sleep(SHORT + 2.0)
    assert not any(group.is_lost for group in groups)
    verify.close()


def drop_a_result_after_a_failure():
    """A call during which a rank fails returns nothing: its collective may have been aborted."""
    group = rank_group(same_batch=True)
    raises(
        gk.RankError, lambda: group.guard(group.leave, LookupError("no such request")), "no such"
    )


def die_between_replays():
    """The other ranks end with an error that names the rank that ended."""
    group = rank_group(time_limit=SHORT)
    verify = captured(group)
    verify.run(batch(1))
    if is_rank(1):
        die()
    found = raises(gk.RankError, lambda: verify.run(batch(1)), "rank 1 ended")
    assert found.ranks == (1,)
    raises(gk.RankError, lambda: verify.run(batch(1)), "rank 1")
    verify.close()


def die_during_capture():
    """The other ranks end with an error within the time limit."""
    group = rank_group(time_limit=SHORT)

    def dying(inputs):
        output = step(inputs)
        if is_rank(1) and inputs.batch_size == 2:
            die()
        return output

    found = raises(gk.CaptureError, runner(group, dying).capture, "rank")
    assert found.rank is not None
