"""The audit of foreign graphs finds planted faults on a stand-in device and changes no result."""

from __future__ import annotations

import gc
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from graphkit.audit.foreign import following
from graphkit.audit.foreign.audit_options import AuditOptions
from graphkit.audit.foreign.audits.program_audit import ProgramAudit
from graphkit.audit.foreign.audits.static_memory import StaticMemories
from graphkit.audit.foreign.digest import differences, digest_of_graphs
from graphkit.audit.foreign.hooks import observe_captures, observe_replays
from graphkit.audit.live_tensors import LiveTensors
from graphkit.graphs import tracked_objects
from graphkit.graphs.tracked_objects import _thawed as thawed
from stand_in_device import StandInDevice, View

NUM = 64
HERE = "foreign/test_program_audit.py"


class Layer(nn.Module):
    def __init__(self, device):
        super().__init__()
        weight = device.full(NUM, NUM, value=0.5)
        self.weight = nn.Parameter(weight, requires_grad=False)


class Engine:
    """A program: an input, a layer, state, and a graph that somebody captures."""

    def __init__(self, device, graph_class):
        self.device, self.layer = device, Layer(device)
        self.x = device.full(NUM, value=1)
        self.total = device.full(NUM, value=0)
        self.rows = device.full(4, value=0, dtype=torch.int64)
        self.cache = device.full(3 << 18, value=0)  # 3 MiB: several chunks of watched memory
        self.graph = graph_class()

    def step(self, x=None):
        """Multiply, add noise, and accumulate in place."""
        device = self.device
        hidden = device.empty(NUM, source="engine.py:1 in step")
        out = device.empty(NUM, source="engine.py:2 in step")
        device.launch("matmul", multiply, hidden, self.layer.weight, self.x if x is None else x,
                      source="engine.py:3 in step")  # fmt: skip
        device.launch("noise", add_noise, out, hidden, source="engine.py:4 in step")
        device.launch("sum", torch.Tensor.add_, self.total, out, source="engine.py:5 in step")
        device.launch("store", store, self.cache, out, source="engine.py:6 in step")
        return out

    def capture(self, step):
        self.graph.capture_begin()
        self.y = step()
        self.graph.capture_end()

    def state(self):
        return [each.clone() for each in (self.x, self.total, self.y, self.cache)]


def multiply(out, weight, x):
    torch.mv(weight, x, out=out)


def add_noise(out, x):
    out.copy_(x + torch.rand(len(x)))


def store(cache, x):
    """Write at a distance that depends on earlier contents."""
    at = int(cache[0])
    cache[at + 1 : at + 1 + len(x)] = x
    cache[0] = at + (1 << 17)


@pytest.fixture
def make(tmp_path):
    """Return ``make(**options)``: a program whose graphs an audit follows, and the audit."""

    def new(*, is_audited=True, **options):
        device = StandInDevice()
        graph_class = device.graph_class()
        audit = ProgramAudit(
            AuditOptions(report=tmp_path / "report.json", **options), None, lambda: device
        )
        if is_audited:
            observe_captures(graph_class, audit.new_capture)
            observe_replays(graph_class, lambda: audit)
        torch.manual_seed(0)
        return Engine(device, graph_class), audit

    return new


def first(audit):
    report = audit.results.current()
    assert report.findings, report.checks
    return report.findings[0]


def assert_captured_here(mode):
    """The place of capture is the line of ``Engine.capture``."""
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "capture_begin()" in text)
    assert mode == f"{HERE}:{line} in capture"


def check_texts(audit):
    return {check.audit: check.text for check in audit.results.current().checks}


def run(engine, replays=6):
    """Return what a program sees after each replay, and random numbers at the end."""
    engine.capture(engine.step)
    seen = []
    for number in range(replays):
        engine.x.fill_(number + 1)
        engine.graph.replay()
        seen += engine.state()
    return [*seen, torch.rand(4)]


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1, 2])
def test_a_sound_program_computes_the_same_bits_and_has_no_finding(make, every):
    expected = run(make(is_audited=False)[0])
    engine, audit = make(every=every)
    for got, want in zip(run(engine), expected, strict=True):
        assert torch.equal(got, want)
    report = audit.results.current()
    assert report.findings == ()
    assert check_texts(audit)["pool-poison"].startswith("overwrote")
    checked = {0: 1, 1: 6, 2: 3}[every]
    assert engine.graph.num_runs > 6 + 3 * checked  # each check repeats the replay


def test_a_freed_input_is_named_with_its_node(make):
    engine, audit = make()
    x = engine.device.full(NUM, value=3)
    engine.capture(partial(engine.step, x))
    del x
    engine.graph.replay()
    found = assert_found(audit, "freed memory", "error", "matmul")
    assert found.source == "engine.py:3 in step"


def test_memory_that_was_freed_and_handed_out_again_is_still_found(make):
    engine, audit = make()
    x = engine.device.full(NUM, value=3)
    engine.capture(partial(engine.step, x))
    address = x.data_ptr()
    del x
    other = engine.device.full(NUM, value=4)
    assert other.data_ptr() == address
    engine.graph.replay()
    assert first(audit).kind == "freed memory"


def test_a_replaced_static_tensor_is_named_by_its_attribute(make):
    engine, audit = captured(make, Engine.step)
    engine.x = engine.device.full(NUM, value=2)
    engine.graph.replay()
    assert "Engine.x" in assert_found(audit, "replaced buffer", "error", "matmul").names


@pytest.fixture
def held(monkeypatch):
    """Return the attributes of some owners: an object, a module, a dict of each, an nn.Module."""
    module, network, thing = ModuleType("program"), nn.Module(), Engine.__new__(Engine)
    monkeypatch.setitem(sys.modules, "program", module)
    module.static, thing.static = {}, {}
    network.register_buffer("x", torch.zeros(1))
    return {
        "Engine.x": vars(thing), "program.x": vars(module), "Module.x": network._buffers,
        "Engine.static['x']": thing.static, "program.static['x']": module.static,
        "owners": (module, network, thing),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["Engine.x", "program.x", "Module.x", "Engine.static['x']", "program.static['x']"],
)
@pytest.mark.parametrize("severity", ["error", "warning"])
def test_a_replaced_input_is_named_by_what_held_it(make, held, name, severity):
    engine, audit = make()
    held[name]["x"] = engine.device.full(NUM, value=3)
    engine.capture(lambda: engine.step(held[name]["x"]))
    engine.graph.replay()
    kept = held[name]["x"] if severity == "warning" else None
    held[name]["x"] = engine.device.full(NUM, value=4)
    engine.graph.replay()
    assert name in assert_found(audit, "replaced buffer", severity, "matmul").names
    del kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Engine.x", "Module.x", "program.static['x']"])
def test_a_program_that_freezes_the_collector_is_audited(make, held, name, monkeypatch):
    monkeypatch.setattr(tracked_objects, "_thawed", thawed)
    engine, audit = make()
    held[name]["x"] = engine.device.full(NUM, value=3)
    gc.freeze()
    engine.capture(lambda: engine.step(held[name]["x"]))
    held[name]["x"] = engine.device.full(NUM, value=4)
    engine.graph.replay()
    assert name in assert_found(audit, "replaced buffer", "error", "matmul").names
    assert gc.get_freeze_count()


def test_a_replaced_tensor_that_still_exists_is_a_warning(make):
    engine, audit = make()
    engine.capture(engine.step)
    kept = engine.x
    engine.x = engine.device.full(NUM, value=2)
    engine.graph.replay()
    assert_found(audit, "replaced buffer", "warning", "matmul")
    assert kept is not engine.x


def add_last(engine):
    """Run the step, and add what the replay before left in memory of the pool."""
    last = engine.device.empty(NUM, source="engine.py:9 in stale")
    out = engine.step()
    engine.device.launch("add", torch.Tensor.add_, out, last, source="engine.py:10 in stale")
    engine.device.launch("copy", torch.Tensor.copy_, last, out)
    return out


def test_a_stale_read_of_the_pool_is_named_by_its_allocation(make):
    _, audit = captured(make, add_last)
    found = assert_found(audit, "stale pool memory", "error", "add")
    assert "engine.py:9 in stale" in found.text
    assert found.source == "engine.py:10 in stale"


def test_memory_is_restored_after_a_finding(make):
    def stale(engine):
        engine.capture(partial(add_last, engine))
        for _ in range(3):
            engine.graph.replay()
        return engine.state()

    expected = stale(make(is_audited=False)[0])
    engine, audit = make(every=1)
    got = stale(engine)
    assert first(audit).kind == "stale pool memory"
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def captured(make, step, **options):
    """Return a program that has captured ``step(engine)`` and replayed it once, and its audit."""
    engine, audit = make(**options)
    engine.capture(partial(step, engine))
    engine.graph.replay()
    return engine, audit


def add_from(source):
    """Return a step that also adds ``source(engine)``, a tensor that nothing else refers to."""

    def step(engine):
        out = engine.step()
        engine.device.launch("add", torch.Tensor.add_, out, source(engine),
                             source="engine.py:30 in add")  # fmt: skip
        return out

    return step


def multiply_broadcast(engine, *leftovers):
    """Run the step, then multiply its output by ``engine.scale``; the kernel has a large struct."""
    out = engine.step()
    engine.device.launch("mul", torch.Tensor.mul_, out, engine.scale, leftovers=leftovers,
                         source="engine.py:32 in scale")  # fmt: skip
    return out


@pytest.mark.parametrize(("new", "kind"), [(None, "freed memory"), (2, "replaced buffer")])
def test_an_operand_in_a_large_struct_is_followed(make, new, kind):
    """Its other bytes may be leftovers of the stack, but the operation has this operand."""
    engine, audit = make()
    engine.scale = engine.device.full(1, value=3)
    engine.capture(partial(multiply_broadcast, engine))
    engine.graph.replay()
    assert audit.results.current().findings == ()
    engine.scale = new and engine.device.full(1, value=new)
    engine.graph.replay()
    assert "Engine.scale" in assert_found(audit, kind, "error", "mul").names


def test_leftovers_of_the_stack_are_counted_and_no_finding(make):
    engine, audit = make()
    engine.scale = engine.device.full(1, value=3)
    other = engine.device.full(NUM, value=3)
    engine.capture(partial(multiply_broadcast, engine, other.data_ptr()))
    assert "1 possibly unset" in check_texts(audit)["pointers"]
    del other
    engine.graph.replay()
    assert audit.results.current().findings == ()


def test_an_address_that_was_a_leftover_of_an_earlier_node_is_followed(make):
    engine, audit = make()
    engine.scale = engine.device.full(1, value=3)
    engine.other = engine.device.full(NUM, value=3)

    def step():
        out = multiply_broadcast(engine, engine.other.data_ptr())
        engine.device.launch("add", torch.Tensor.add_, out, engine.other, source="engine.py:33")
        return out

    engine.capture(step)
    del engine.other
    engine.graph.replay()
    assert_found(audit, "freed memory", "error", "add")


def assert_found(audit, kind, severity, kernel):
    found = first(audit)
    assert (found.kind, found.severity, found.kernel) == (kind, severity, kernel)
    assert found.source.startswith("engine.py:")
    assert_captured_here(found.mode)
    assert len(audit.results.current().findings) == 1
    return found


def test_memory_of_another_pool_without_a_tensor_is_an_error(make):
    """The program reads what another graph has left in its pool."""
    engine, audit = make()
    other = type(engine.graph)()
    other.capture_begin()
    left = engine.device.empty(NUM)
    engine.device.launch("fill", torch.Tensor.zero_, left)
    other.capture_end()
    place = View(left.data_ptr(), left.nbytes, left.dtype, (NUM,))
    del left
    engine.capture(partial(add_from(lambda _: place), engine))
    assert_found(audit, "memory of another graph's pool", "error", "add")


def test_another_graphs_output_that_lives_is_no_finding(make):
    engine, audit = make()
    other = type(engine.graph)()
    other.capture_begin()
    output = engine.device.empty(NUM)
    engine.device.launch("fill", torch.Tensor.zero_, output)
    other.capture_end()
    engine.capture(partial(add_from(lambda _: output), engine))
    assert audit.results.current().findings == ()


def test_pinned_memory_without_a_tensor_is_a_warning(make):
    def unowned(engine):
        host = engine.device.pinned_host(NUM)
        return View(host.data_ptr(), host.nbytes, host.dtype, (NUM,))

    engine, audit = make()
    engine.capture(partial(add_from(unowned), engine))
    assert_found(audit, "unowned host memory", "warning", "add")


def test_pinned_memory_that_is_freed_after_the_capture_is_an_error(make):
    def held(engine):
        engine.host = engine.device.pinned_host(NUM)
        return engine.host

    engine, audit = captured(make, add_from(held))
    assert audit.results.current().findings == ()
    del engine.host
    engine.graph.replay()
    assert "Engine.host" in assert_found(audit, "freed memory", "error", "add").names


def test_a_copy_from_memory_that_is_not_pinned_is_a_warning(make):
    def step(engine):
        out = engine.step()
        engine.pageable = torch.ones(NUM)
        engine.device.launch("copy", torch.Tensor.copy_, out, engine.pageable,
                             source="engine.py:31 in copy", kind="memcpy")  # fmt: skip
        return out

    _, audit = captured(make, step)
    assert_found(audit, "pageable host memory", "warning", "copy")


def test_a_copy_from_pinned_memory_is_no_finding(make):
    def step(engine):
        out = engine.step()
        engine.host = engine.device.pinned_host(NUM)
        engine.device.launch("copy", torch.Tensor.copy_, out, engine.host, kind="memcpy")
        return out

    _, audit = captured(make, step)
    assert audit.results.current().findings == ()


@pytest.mark.parametrize("us_per_launch", [5.0, 500.0])
def test_a_slow_launch_is_a_note(make, us_per_launch):
    engine, audit = make()
    engine.device.us_per_launch = us_per_launch
    engine.capture(engine.step)
    engine.graph.replay()
    assert "4 nodes launch in " in check_texts(audit)["pool-poison"]
    found = [(each.kind, each.severity) for each in audit.results.current().findings]
    assert found == ([("slow launch", "note")] if us_per_launch > 100 else [])


@pytest.fixture
def followed_calls(make, monkeypatch):
    """Return ``make`` for audits that calls such as ``empty_cache`` cause to check pointers."""
    monkeypatch.setattr(following, "_audits", [])
    for owner in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(owner, "empty_cache", torch.cuda.empty_cache)
    for name in ("load_state_dict", "to", "cpu", "cuda"):
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))

    def new(**options):
        engine, audit = make(**options)
        following.begin(audit)
        return engine, audit

    return new


def between_checks(engine):
    """Replay so often that the next replay checks nothing by itself."""
    for _ in range(3):
        engine.graph.replay()


def test_a_workspace_freed_by_empty_cache_is_found_at_the_next_replay(followed_calls):
    def workspace(engine):
        block = engine.block = engine.device.workspace(512)
        return View(block.begin, 256, torch.float32, (NUM,))

    engine, audit = captured(followed_calls, add_from(workspace))
    between_checks(engine)
    engine.block.is_active = False
    engine.device.empty_cache()
    engine.graph.replay()
    assert audit.results.current().findings == ()
    torch.cuda.empty_cache()
    engine.graph.replay()
    found = assert_found(audit, "freed memory", "error", "add")
    assert "no longer mapped" in found.text


def load_other_weights(engine):
    weight = engine.device.full(NUM, NUM, value=2)
    engine.layer.load_state_dict({"weight": weight}, assign=True)


def move_and_return(engine):
    engine.layer.to(torch.float64)
    engine.layer.to(torch.float32)


@pytest.mark.parametrize("update", [load_other_weights, move_and_return])
def test_weights_that_an_update_puts_elsewhere_are_found_at_the_next_replay(followed_calls, update):
    engine, audit = captured(followed_calls, Engine.step)
    between_checks(engine)
    update(engine)
    engine.graph.replay()
    found = assert_found(audit, "replaced buffer", "error", "matmul")
    assert "Layer.weight" in found.names


def test_an_update_in_place_is_no_finding(followed_calls):
    engine, audit = captured(followed_calls, Engine.step)
    engine.layer.load_state_dict({"weight": torch.ones(NUM, NUM)})
    engine.graph.replay()
    assert audit.results.current().findings == ()


def test_memory_asleep_is_found_on_request_and_mapped_memory_is_none(make):
    engine, audit = captured(make, Engine.step)
    assert audit.check_now().findings == ()
    engine.device.asleep.add((0, 0))
    assert {each.kind for each in audit.check_now().findings} == {"freed memory"}
    names = {name for each in audit.results.current().findings for name in each.names}
    assert {"Layer.weight", "Engine.x", "Engine.cache"} <= names


def test_a_pool_asleep_is_found_on_request(make):
    engine, audit = captured(make, Engine.step)
    engine.device.asleep.add(engine.graph.pool())
    (found,) = audit.check_now().findings
    assert (found.kind, found.severity, found.kernel) == ("freed memory", "error", "noise")
    assert "the graph's pool that is no longer mapped" in found.text


def test_a_graph_that_is_reset_is_not_checked_any_more(make):
    engine, audit = captured(make, Engine.step)
    engine.graph.reset()
    engine.x = engine.device.full(NUM, value=2)
    assert (audit.check_now().findings, audit.graphs) == ((), [])
    engine.capture(engine.step)
    engine.graph.replay()
    assert audit.check_now().findings == ()
    assert len(audit.graphs) == 1


def digest(engine, audit):
    return digest_of_graphs(engine.device, audit.graphs)


def test_equal_state_has_equal_digests(make):
    engine, audit = captured(make, Engine.step)
    assert differences(digest(engine, audit), digest(engine, audit)) == ()


def test_a_weight_zeroed_in_sleep_is_an_error_and_an_update_a_note(make):
    engine, audit = captured(make, Engine.step)
    before = digest(engine, audit)
    engine.layer.weight.fill_(2)
    (note,) = differences(before, digest(engine, audit))
    assert (note.kind, note.severity, note.names) == ("weight differs", "note", ("Layer.weight",))
    engine.layer.weight.zero_()
    (found,) = differences(before, digest(engine, audit))
    assert (found.kind, found.severity) == ("weight differs", "error")
    assert "`matmul` (node 0) at engine.py:3 in step" in found.text
    assert_captured_here(found.mode)


def test_a_pool_dropped_in_sleep_is_an_error(make):
    engine, audit = captured(make, Engine.step)
    before = digest(engine, audit)
    engine.device.unmapped.add(engine.graph.pool())
    found = differences(before, digest(engine, audit))[0]
    assert (found.kind, found.severity) == ("pool differs", "error")
    assert "is gone" in found.text
    assert "`noise` (node 1)" in found.text
    assert_captured_here(found.mode)


def gather(out, table, rows):
    out.copy_(table.flatten()[rows])


def indexed(engine, rows=(0, 1, 1 << 40), kind="kernel"):
    def step():
        out = engine.step()
        values = engine.device.empty(4)
        engine.device.launch("gather", gather, values, engine.layer.weight, engine.rows, kind=kind,
                             source="engine.py:20 in lookup", module="Engine.lookup")  # fmt: skip
        return out

    engine.capture(step)
    for row in rows:
        engine.rows.fill_(row)
        engine.graph.replay()


def assert_fault(audit, text):
    (found,) = audit.results.current().findings
    assert (found.audit, found.severity) == ("fault", "error")
    assert f"{text}: an illegal memory access" in found.text
    return found


def test_an_index_out_of_range_is_found_in_its_replay_and_then_in_its_node(make):
    engine, audit = make(find_fault=True)
    indexed(engine)
    found = assert_fault(audit, "replay 3 failed")
    assert_captured_here(found.mode)

    engine, again = make(find_fault=True, node_by_node=(found.mode, 3))
    indexed(engine)
    node = assert_fault(again, "`gather` (node 4) failed in replay 3")
    assert (node.kernel, node.source) == ("gather", "engine.py:20 in lookup")
    assert node.module == "Engine.lookup"
    assert {"Layer.weight", "Engine.rows"} <= {*node.names}
    assert f"2 = {hex(engine.rows.data_ptr())}" in node.text
    assert_captured_here(node.mode)


def test_a_fault_of_other_work_is_not_the_next_replays(make):
    engine, audit = make(find_fault=True)
    indexed(engine, rows=(0,))
    engine.device.error = "an illegal memory access was encountered"
    engine.graph.replay()
    assert assert_fault(audit, "work outside of graphs failed before replay 2").mode == ""


def test_a_fault_in_a_checked_replay_is_assigned_to_it(make):
    engine, audit = make()
    indexed(engine, rows=(1 << 40,))
    assert_captured_here(assert_fault(audit, "replay 1 failed").mode)
    assert check_texts(audit)["pool-poison"] == "not checked: the replay failed"


def test_a_fault_in_a_replay_without_a_check_is_reported_at_the_end(make):
    engine, audit = make()
    indexed(engine)
    assert audit.results.current().findings == ()
    audit.end()
    found = assert_fault(audit, "a replay or other work failed, it is not known which")
    assert "--find-fault" in found.advice


def test_a_graph_that_cannot_run_node_by_node_still_names_the_replay(make):
    engine, audit = make()
    engine.capture(engine.step)
    name = audit.graphs[0].name
    engine, audit = make(find_fault=True, node_by_node=(name, 3))
    indexed(engine, kind="child graph")
    found = assert_fault(audit, "because node 4, a child graph, cannot be switched off")
    assert "replay 3 failed" in found.text


@pytest.mark.slow
def test_a_replay_node_by_node_without_a_fault_computes_the_same(make):
    expected = run(make(is_audited=False)[0])
    engine, _ = make()
    engine.capture(engine.step)
    name = _.graphs[0].name
    engine, audit = make(node_by_node=(name, 2))
    assert all(torch.equal(*pair) for pair in zip(run(engine), expected, strict=True))
    assert "4 nodes ran one by one without a fault" in check_texts(audit)["fault"]


def test_what_cannot_be_repeated_is_listed_and_replayed_once(make):
    engine, audit = make()
    engine.device.num_ranks_ = 2
    engine.capture(engine.step)
    engine.graph.replay()
    assert engine.graph.num_runs == 1
    assert "not checked" in check_texts(audit)["pool-poison"]


@pytest.mark.parametrize(
    ("limit", "reason"), [({"seconds": 0.0}, "more than the 0 s"), ({"megabytes": 1}, "and needs")]
)
def test_a_check_beyond_its_limits_is_listed_and_changes_nothing(make, limit, reason):
    expected = run(make(is_audited=False)[0])
    engine, audit = make(**limit)
    assert all(torch.equal(*pair) for pair in zip(run(engine), expected, strict=True))
    text = check_texts(audit)["pool-poison"]
    assert text.startswith("not checked: ")
    assert reason in text


def test_a_graph_that_is_gone_is_followed_no_longer(make):
    engine, audit = make()
    engine.capture(engine.step)
    assert len(audit.graphs) == 1
    del engine.graph
    gc.collect()
    assert not audit.graphs


@pytest.mark.parametrize("num_graphs", [4, 16])
def test_captures_of_known_memory_search_the_process_once(make, monkeypatch, num_graphs):
    """A weight, inputs, and a workspace that no tensor holds."""
    engine, audit = make()
    block = engine.device.workspace(512)
    workspace = View(block.begin, 256, torch.float32, (NUM,))
    searches = []
    get_objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(1) or get_objects())
    graphs = []
    for _ in range(num_graphs):
        engine.graph = type(engine.graph)()
        engine.graph.capture_begin(graphs[0].pool() if graphs else None)
        graphs.append(engine.graph)
        engine.y = add_from(lambda _: workspace)(engine)
        engine.graph.capture_end()
    assert len(audit.graphs) == num_graphs
    assert "1 without a tensor" in check_texts(audit)["pointers"]
    assert len(searches) == 2  # one for tensors, one for modules
    engine.x, engine.graph = engine.device.full(NUM, value=2), type(engine.graph)()
    engine.capture(engine.step)
    assert len(searches) == 4
    engine.graph.replay()
    assert audit.results.current().findings == ()
    graphs[0].replay()
    assert first(audit).kind == "replaced buffer"


def test_new_memory_around_freed_memory_is_known():
    """A storage that is gone does not hide the one that took its memory."""
    memory = bytearray(256)
    memories = StaticMemories()
    part = torch.frombuffer(memory, dtype=torch.uint8, offset=128)
    address = part.data_ptr()
    assert memories.find([address], LiveTensors())[address].begin == address
    del part
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    found = memories.find([address + 1], LiveTensors())[address + 1]
    assert found.begin == whole.data_ptr()


def test_graphs_that_are_gone_are_forgotten_in_time(make):
    engine, audit = make()
    for _ in range(40):
        engine.graph = type(engine.graph)()
        engine.graph.capture_begin((0, 1))
        engine.graph.capture_end()
        gc.collect(0)
    assert len(audit.graphs) == 1
    assert len(audit._graphs) <= 4


def test_the_search_for_holders_keeps_no_tensor_alive(monkeypatch):
    """Not even until the next collection of cycles: the program's memory would not be freed."""
    module = ModuleType("program")
    monkeypatch.setitem(sys.modules, "program", module)
    module.x, module.static = torch.ones(NUM), {"y": torch.ones(NUM)}
    gc.disable()
    try:
        addresses = [module.x.data_ptr(), module.static["y"].data_ptr()]
        memories = list(StaticMemories().find(addresses, LiveTensors()).values())
        assert [each.name for each in memories] == ["program.x", "program.static['y']"]
        assert not any(each.is_freed for each in memories)
        del module.x, module.static["y"]
        assert all(each.is_freed for each in memories)
    finally:
        gc.enable()
