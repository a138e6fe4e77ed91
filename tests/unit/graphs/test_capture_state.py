"""During a capture of the recorder, torch reports a capture, as on CUDA."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.cuda import is_current_stream_capturing
from torch.overrides import TorchFunctionMode

import graphkit as gk
from graphkit.graphs import CaptureFailure, RecorderBackend
from graphkit.graphs.capture_state import reporting_capture
from graphkit.testing import assert_replay_equivalent

ASKED = {
    "torch.cuda": lambda: torch.cuda.is_current_stream_capturing(),
    "torch.cuda.graphs": lambda: torch.cuda.graphs.is_current_stream_capturing(),
    "imported name": is_current_stream_capturing,
    "graphkit": gk.graphs.is_capturing,
}
X = torch.arange(6.0)


def capture(function):
    backend = RecorderBackend()
    with backend.session():
        return backend.capture(function)


def answers():
    return [answer(ask) for ask in ASKED.values()]


def answer(ask):
    """False as well where torch is built without CUDA: it raises then."""
    try:
        return ask()
    except RuntimeError:
        return False


def test_every_query_reports_the_capture():
    found = []
    assert not any(answers())
    capture(lambda: found.extend(answers()))
    assert all(found)
    assert len(found) == len(ASKED)
    assert not any(answers())


def test_the_end_of_an_inner_capture_leaves_the_outer_one():
    found = []

    def outer():
        capture(lambda: X + 1)
        found.extend(answers())

    capture(outer)
    assert all(found)
    assert not any(answers())


def test_a_diagnosis_on_cuda_takes_the_path_of_the_capture():
    """Its tensors on the CPU are in host memory, so that it is no recording."""
    with reporting_capture():
        assert torch.cuda.is_current_stream_capturing()
        assert not gk.graphs.is_recording()
        with reporting_capture():
            pass
        assert torch.cuda.is_current_stream_capturing()
    assert not any(answers())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_answer_is_restored_after_an_error(error):
    functions = torch.cuda.graphs._cuda_isCurrentStreamCapturing, torch.overrides.has_torch_function

    def fail():
        raise error

    with pytest.raises((CaptureFailure, KeyboardInterrupt)):
        capture(fail)
    assert not any(answers())
    assert functions == (
        torch.cuda.graphs._cuda_isCurrentStreamCapturing, torch.overrides.has_torch_function,
    )  # fmt: skip


def test_other_threads_do_not_capture():
    found = []

    def elsewhere():
        found.extend([*answers(), torch.overrides.has_torch_function((X,))])

    def function():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    capture(function)
    assert len(found) == len(ASKED) + 1
    assert not any(found)


def test_the_answer_of_cuda_remains_outside_of_captures(monkeypatch):
    monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: True)
    capture(lambda: X + 1)
    assert torch.cuda.is_current_stream_capturing()


class Overrides(torch.Tensor):
    """A tensor of another library."""


class OtherMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_only_overrides_of_others_count():
    found = []
    other = X.as_subclass(Overrides)

    def function():
        ask = torch.overrides.has_torch_function
        found.append((ask((X,)), ask((X, other))))
        with OtherMode():
            found.append((ask((X,)), ask((X, other))))

    function()
    capture(function)
    assert found == 2 * [(False, True), (True, True)]


SPEC = gk.SpecConfig("EAGLE", num_steps=3, topk=1, num_draft_tokens=4)
WIDTH = SPEC.num_draft_tokens


def encoder_runner(forward, vocab_size=24):
    sizes = gk.BufferSizes(2, 32, 16, vocab_size, torch.float32)
    return gk.TargetVerifyRunner(
        forward, spec=SPEC, sizes=sizes, batch_sizes=[2], device="cpu", check=False
    )


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
        ),
    ],
    ids=["layer", "encoder"],
)
def test_the_fast_path_of_encoder_layers_is_captured(make, count):
    torch.manual_seed(2)
    embed, encoder, head = nn.Embedding(24, 16), make().eval(), nn.Linear(16, 24)

    def forward(inputs):
        rows = encoder(embed(inputs.input_ids).view(-1, WIDTH, 16))
        return gk.ForwardOutput(next_token_logits=head(rows.flatten(0, 1)))

    with encoder_runner(forward) as runner:
        runner.capture()
        names = [op.op.name() for op in runner.graphs[2].ops]
        assert "aten::_transformer_encoder_layer_fwd" in names
        batch = batch_of(count)
        padded = runner.run_padded(batch).next_token_logits.clone()
        assert torch.equal(runner.replay(batch).next_token_logits, padded)
        assert_replay_equivalent(runner, [batch])


def batch_of(count):
    rows = torch.arange(count * WIDTH)
    return gk.TargetVerifyInputs(
        req_pool_indices=torch.arange(1, count + 1),
        seq_lens=torch.full((count,), 5, dtype=torch.int32),
        input_ids=rows % 24,
        positions=5 + rows % WIDTH,
        out_cache_loc=1 + rows,
    )


SMALL = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0,
    "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_encoders_of_transformers_with_a_mask_are_captured(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    config = getattr(transformers, f"{name}Config")(**SMALL)
    model, head = getattr(transformers, f"{name}Model")(config).eval(), nn.Linear(16, 24)

    def forward(inputs):
        ids = inputs.input_ids.view(-1, WIDTH)
        mask = ids.new_ones(ids.shape)
        rows = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return gk.ForwardOutput(next_token_logits=head(rows.flatten(0, 1)))

    with encoder_runner(forward) as runner:
        runner.capture()
        assert_replay_equivalent(runner, [batch_of(1), batch_of(2)])
