"""Captured attention: replays follow the inputs of the moment, and wait for what they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphkit.config import BufferSizes
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.spec import ForwardMode
from launched_kernels import launches
from op_devices import CPU, CUDA, by, captured

WIDE = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}


@by(CPU, CUDA)
@pytest.mark.parametrize(
    "options", [{}, {"tree": True}, {"head_dim": 48, "latent": 32, "window": 12}], ids=str
)
def test_a_layer_follows_its_inputs(run, make_case, assert_attends, backend_type, options):
    case = make_case([70, 300, 16], width=4, page_size=4, heads=4, device=run.torch_device,
                     context=512, **options)  # fmt: skip
    backend = case.backend(backend_type)
    backend.init_state(BufferSizes(4, 512, 1, 1, torch.float32, 4), max_tokens=16)
    graph = captured(run, lambda: case.attend_by(backend))
    for order in ([2, 0, 1], [1, 2, 0]):
        case.reorder(order)
        graph.output.fill_(torch.nan)
        graph.replay()
        assert_attends(graph.output, case)


@by(CPU, CUDA)
def test_a_layer_follows_the_selected_keys(run, make_case, backend_type):
    case = make_case([9, 30, 17], width=4, head_dim=48, latent=32, device=run.torch_device)
    case.store()
    backend = case.backend(backend_type)
    metadata = backend.metadata(case.mode, case.inputs)
    positions = torch.randint(-1, 9, (12, 6)).sort(descending=True).values.to(case.query.device)

    def attend(kind):
        return case.backend(kind).attend_positions(1, case.query, positions, metadata)

    graph = captured(run, lambda: attend(backend_type))
    for _ in range(2):
        case.query.copy_(case.query.flip(0))
        positions.copy_(positions.roll(1, 0))
        graph.replay()
        torch.testing.assert_close(graph.output, attend(SdpaAttention), atol=1e-4, rtol=1e-4)


@by(CPU, CUDA)
def test_a_layer_follows_the_accepted_tokens(run, make_case, backend_type):
    case = make_case([40, 7], mode=ForwardMode.DRAFT_EXTEND, width=4, pads=1, heads=4,
                     device=run.torch_device)  # fmt: skip
    for tensor in case.pool.tensors().values():
        tensor.nan_to_num_(0)
    for tensor in (case.key, case.value):
        tensor.nan_to_num_(0)
    inputs, table = case.inputs, case.requests.req_to_token
    graph = captured(run, lambda: case.attend(backend_type))
    for accepted in ([4, 1, 1], [1, 1, 1], [4, 4, 4], [2, 3, 1]):
        lengths = [40 + accepted[0], 7 + accepted[1], 1]
        inputs.num_accepted_tokens.copy_(torch.tensor(accepted))
        inputs.seq_lens.copy_(torch.tensor(lengths))
        rows = zip(inputs.req_pool_indices.tolist(), lengths, accepted, strict=True)
        places = [slot for row, end, count in rows for slot in table[row, end - count : end]]
        case.out_cache_loc.zero_()[: len(places)] = torch.stack(places)
        graph.output.fill_(torch.nan)
        graph.replay()
        live, want = sum(accepted[:2]), case.attend(SdpaAttention)
        torch.testing.assert_close(graph.output[:live], want[:live], atol=1e-5, rtol=1e-5)
        assert graph.output[sum(accepted) :].eq(0).all()


@by(CUDA)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_replays_of_split_attention_are_equal(run, make_case, assert_attends, tree):
    """The join waits for all partial results, though it starts before they are there."""
    case = make_case([4000], width=4, tree=tree, device="cuda", **WIDE)
    graph = captured(run, lambda: [case.attend(TritonAttention) for _ in range(3)])
    want = None
    for _ in range(100):
        for out in graph.output:
            out.fill_(torch.nan)
        graph.replay()
        want = graph.output[0].clone() if want is None else want
        assert all(torch.equal(out, want) for out in graph.output)
    assert_attends(want, case, 1.6e-2)


@by(CUDA)
@pytest.mark.parametrize("width", [1, 4])
def test_steps_read_the_keys_of_earlier_steps(run, make_case, width):
    """Attention requests older keys while the store runs, among them those of the step before."""
    steps, ends = 8, [500, 3000]
    case = make_case(ends, width=width, device="cuda", **WIDE)
    backend = case.backend(TritonAttention)
    slots = [case.requests.req_to_token[row] for row in case.inputs.req_pool_indices.tolist()]
    begins = [end - width * (steps - 1) for end in ends]
    appended = []
    for step in range(steps):
        lengths = [begin + width * step for begin in begins]
        inputs = replace(case.inputs, seq_lens=torch.tensor(lengths, dtype=torch.int32).cuda())
        own = zip(slots, lengths, strict=True)
        loc = torch.cat([row[length : length + width] for row, length in own]).long()
        rows = [torch.randn(2 * width, heads, 128).cuda().bfloat16() for heads in (32, 8, 8)]
        appended.append((inputs, loc, rows))

    def attend():
        for inputs, loc, rows in appended:
            yield backend.attend(1, *rows, loc, backend.metadata(case.mode, inputs))

    def forget_rows():
        for tensor in (case.pool.get_key_buffer(1), case.pool.get_value_buffer(1)):
            for row, begin, end in zip(slots, begins, ends, strict=True):
                tensor[row[begin : end + width].long()] = torch.nan

    forget_rows()
    want = []
    for out in attend():
        torch.cuda.synchronize()
        want.append(out)
    assert all(out.isfinite().all() for out in want)
    graph = captured(run, lambda: list(attend()))
    for _ in range(50):
        forget_rows()
        graph.replay()
        assert all(map(torch.equal, graph.output, want))


@by(CUDA)
def test_metadata_is_one_kernel(run, make_case):
    case = make_case([70, 300, 16], width=4, dtype=torch.bfloat16, device="cuda")
    backend = case.backend(TritonAttention)
    ours = [name for name in launches(lambda: case.attend_by(backend)) if name.endswith("_kernel")]
    assert ours[:3] == ["paged_metadata_kernel", "store_kv_kernel", "paged_attention_kernel"]
    assert set(ours[3:]) <= {"join_segments_kernel", "join_paths_kernel"}
