"""A replay that is interrupted at any line leaves a runner whose later replays are right."""

from __future__ import annotations

import pytest

from graphkit.graphs import RecorderBackend
from graphkit.graphs.recorded_graph import RecordedGraph
from interruptions import lines_of, raising_at


def by_numpy(runner, batch):
    return runner.replay(batch)


def by_stage(runner, batch):
    staged = runner.stage(batch.batch_size)
    for name, rows in vars(batch).items():
        if rows is not None:
            setattr(staged, name, rows)
    return staged.replay()


def by_padded_run(runner, batch):
    return runner.run_padded(batch)


def observed(runner, batch):
    def observer(launch):
        launch.read_batch()
        return launch()

    with runner.observe(observer):
        return runner.replay(batch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("act", [by_numpy, by_stage, by_padded_run, observed])
def test_an_interrupt_at_any_line(runner, make_batch, expect, assert_same, act, kind):
    batches = [make_batch(1 + i % 4, seed=i, kind=kind) for i in range(6)]
    for batch in batches:  # the first replay of a size prepares the others
        runner.replay(batch)
    act(runner, batches[0])
    lines = list(lines_of(lambda: act(runner, batches[0])))
    assert len(lines) > 20
    for line in lines:
        with pytest.raises(KeyboardInterrupt), raising_at(line, 1, KeyboardInterrupt()):
            act(runner, batches[2])
        for batch in batches:  # more than the mailbox has entries
            assert_same(runner.replay(batch), expect(batch)), line


class LateBackend(RecorderBackend):
    """A recorder whose replays run when the host waits for the device."""

    def __init__(self):
        super().__init__()
        self.enqueued = []

    def capture(self, *args, **options):
        graph = super().capture(*args, **options)
        replay = {"replay": lambda late: self.enqueued.append(late)}
        graph.__class__ = type("LateGraph", (RecordedGraph,), replay)
        return graph

    def wait_for_device(self):
        enqueued, self.enqueued = self.enqueued, []
        for graph in enqueued:
            RecordedGraph.replay(graph)

    check_device = wait_for_device


@pytest.mark.parametrize("is_launched", [True, False])
def test_an_interrupt_of_a_launch_that_the_device_has_not_run(
    make_runner, make_batch, expect, assert_same, monkeypatch, is_launched
):
    """The driver may have enqueued the graph before the interrupt arrived, or not."""
    backend = LateBackend()
    runner = make_runner(backend=backend)
    runner.capture()
    graph = runner.graphs[2]
    replay = type(graph).replay

    def interrupted(late):
        if is_launched:
            replay(late)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(graph), "replay", interrupted)
        fresh = runner.make_replayer(runner.graphs)
        with pytest.raises(KeyboardInterrupt):
            fresh.replay(make_batch(2, seed=1), None)
    assert len(backend.enqueued) == is_launched
    for seed in range(2, 8):
        batch = make_batch(2, seed=seed)
        output = runner.replay(batch)
        backend.wait_for_device()
        assert_same(output, expect(batch))
