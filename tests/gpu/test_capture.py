"""Capture on CUDA: cleanup after a failure, memory, state and random numbers."""

import gc

import pytest
import torch

import graphkit as gk
from graphkit.graphs import CaptureFailure
from graphkit.graphs.driver import runtime

pytestmark = pytest.mark.gpu

FAILING = {
    "item": (lambda i: i.positions.sum().item(), "host synchronisation", "_local_scalar_dense"),
    "cpu": (lambda i: i.positions.cpu(), "host synchronisation", "_to_copy"),
    "nonzero": (lambda i: i.positions.nonzero(), "data dependent shape", "nonzero"),
    "mask": (lambda i: i.positions[i.positions > 3], "data dependent shape", "index"),
    "upload": (lambda i: torch.tensor([1, 2], device="cuda"), "host synchronisation", ""),
    "memory": (lambda i: torch.empty(1 << 45, device="cuda"), "out of memory", ""),
    "bug": (lambda i: i.no_such_field, "forward error", "AttributeError"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_is_classified_and_leaves_no_trace(
    make_runner, make_batch, forward, name, expected
):
    failing, cause, where = FAILING[name]
    healthy = False

    def step(inputs):
        if inputs.batch_size == 4 and not healthy:
            failing(inputs)
        return forward(inputs)

    torch.cuda.manual_seed(5)
    random_state = torch.cuda.get_rng_state()
    runner = make_runner(step)
    with pytest.raises(gk.CaptureError) as caught:
        runner.capture()
    error = caught.value
    assert (error.mode, error.batch_size, error.cause.label) == ("TARGET_VERIFY", 4, cause)
    assert where in error.where
    assert "test_capture.py" in error.where
    assert "\n" not in str(error)

    assert runner.status == "planned"
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    assert not runner.backend.pool.graphs
    torch.randn(4, device="cuda")  # fails if the generator is still in capture mode
    torch.cuda.empty_cache()

    healthy = True
    runner.capture()
    assert torch.equal(runner.replay(make_batch(3, 7)).hidden_states, expected(3, 7))


def test_a_failed_warm_up_waits_for_its_work():
    """A second attempt must not read memory that the failed one has yet to write."""
    backend = gk.CudaBackend()
    begun = torch.cuda.Event()

    def fails_late():
        torch.cuda._sleep(500_000_000)
        begun.record()
        raise AttributeError("no such field")

    with backend.session():
        with pytest.raises(CaptureFailure):
            backend.warm_up(fails_late)
        assert begun.query()


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
def test_only_captures_leave_the_callers_stream(make_runner, make_batch, forward, expected, own):
    """Eager steps on a second stream would slow all replays of the process."""
    count, seen = torch.zeros(1, device="cuda"), set()

    def step(inputs):
        stream = torch.cuda.current_stream().cuda_stream
        seen.add((torch.cuda.is_current_stream_capturing(), stream))
        count.add_(1)
        return forward(inputs)

    runner = make_runner(step, mutable_state={"count": count})
    with torch.cuda.stream(torch.cuda.Stream() if own else torch.cuda.default_stream()):
        stream = torch.cuda.current_stream().cuda_stream
        torch.cuda._sleep(50_000_000)
        count.add_(5)
        runner.capture()
        assert torch.cuda.current_stream().cuda_stream == stream
        assert runner.backend.pool.last_handle == stream
        assert seen == {(False, stream), (True, runner.backend.stream.cuda_stream)}
        assert count.item() == 5
        assert torch.equal(runner.replay(make_batch(3, 7)).hidden_states, expected(3, 7))
        assert count.item() == 6


def test_library_workspaces_are_not_part_of_the_pool(make_runner, weight):
    backend = gk.CudaBackend()
    backend.stream = torch.cuda.Stream(priority=-1)  # one on which no product was captured yet
    bias = torch.zeros(len(weight), device="cuda")

    def step(inputs):
        hidden = torch.addmm(bias, inputs.input_embeds @ weight, weight)  # cuBLAS and cuBLASLt
        return gk.ForwardOutput(next_token_logits=hidden[:, :32])

    runner = make_runner(step, backend=backend)
    runner.capture()
    blocks = [block for graph in runner.graphs.values() for block in graph.pool_memory()]
    assert all(len(block.data) < 1 << 20 for block in blocks if block.is_live)


def test_closing_frees_the_pool(make_runner):
    runner = make_runner()
    runner.capture()
    assert runner.backend.pool.num_bytes() > 0
    runner.close()
    torch.cuda.empty_cache()
    assert runner.backend.pool.num_bytes() == 0


def test_capture_restores_mutable_state(make_runner, forward):
    counter = torch.zeros(1, device="cuda")

    def step(inputs):
        counter.add_(1)
        return forward(inputs)

    make_runner(step, mutable_state={"counter": counter}).capture()
    assert counter.item() == 0


def test_random_numbers_advance_as_in_eager(make_runner, make_batch):
    def step(inputs):
        noise = torch.rand(inputs.num_tokens, 32, device="cuda")
        return gk.ForwardOutput(next_token_logits=noise)

    runner = make_runner(step, batch_sizes=[16])
    runner.capture()
    batch = make_batch(16, 0)
    torch.cuda.manual_seed(3)
    eager = [runner.fall_back(batch).next_token_logits.clone() for _ in range(3)]
    torch.cuda.manual_seed(3)
    replayed = [runner.replay(batch, clone=True).next_token_logits for _ in range(3)]
    for one, other in zip(eager, replayed, strict=True):
        assert torch.equal(one, other)


def test_autocast_and_inference_mode_are_captured(make_runner, make_batch, weight):
    @torch.inference_mode()
    def step(inputs):
        with torch.autocast("cuda", torch.bfloat16):
            logits = inputs.input_embeds @ weight[:, :32]
        return gk.ForwardOutput(next_token_logits=logits)

    runner = make_runner(step)
    with torch.inference_mode():
        runner.capture()
    batch = make_batch(3, 2)
    replayed = runner.replay(batch, clone=True).next_token_logits
    assert replayed.dtype is torch.bfloat16
    torch.testing.assert_close(replayed, runner.fall_back(batch).next_token_logits)


@pytest.mark.skipif(runtime() is None, reason="needs cuda-bindings")
def test_the_record_counts_nodes(make_runner):
    record = make_runner().capture()
    assert record.backend == "cuda"
    for size in record.sizes:
        assert size.num_nodes >= 5
        assert size.capture_ms > 0
