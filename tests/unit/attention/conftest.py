"""Paged batches with NaN in all slots that no live row may read, and the result by plain loops."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.audit.kit.attention_cases import AttentionBatch, AttentionCase
from graphkit.buffers.attention import EXTENDING
from graphkit.engine.attention import SdpaAttention, TritonAttention
from graphkit.engine.kv import MLATokenToKVPool
from graphkit.spec import ForwardMode


class Case(AttentionBatch):
    """A batch on the CPU that also gives the arguments of ``paged_attention``."""

    row_invariant = True

    @property
    def key_counts(self) -> torch.Tensor:
        """Keys of each request, pads included, int32."""
        appended = 0 if self.mode in EXTENDING else self.inputs.tokens_per_request
        return self.inputs.seq_lens + appended

    @property
    def row_sums(self) -> torch.Tensor:
        """Running sum of rows, pads included, int32."""
        rows = [self.inputs.tokens_per_request] * self.inputs.batch_size
        if self.mode is ForwardMode.DRAFT_EXTEND:
            rows = self.inputs.num_accepted_tokens.tolist()
        sums = [sum(rows[:b]) for b in range(len(rows) + 1)]
        return torch.tensor(sums, dtype=torch.int32, device=self.query.device)

    def store(self) -> None:
        is_latent = isinstance(self.pool, MLATokenToKVPool)
        store = self.pool.set_mla_kv_buffer if is_latent else self.pool.set_kv_buffer
        store(self.layer, self.out_cache_loc, *self.stored)

    def page_table(self) -> torch.Tensor:
        """The table by plain loops."""
        page_size, context = self.pool.page_size, self.requests.max_context_len
        table = torch.zeros(self.inputs.batch_size, -(-context // page_size), dtype=torch.int32)
        for b, row in enumerate(self.inputs.req_pool_indices.tolist()):
            for first in range(0, int(self.key_counts[b]), page_size):
                slot = int(self.requests.req_to_token[row, first])
                table[b, first // page_size] = slot // page_size
        return table.to(self.query.device)

    def op_args(self) -> tuple[object, ...]:
        """Arguments of ``paged_attention``, this step's rows stored."""
        self.store()
        keys, values = self.pool.get_key_buffer(self.layer), self.pool.get_value_buffer(self.layer)
        return (self.query, keys, values, self.page_table(), self.key_counts, self.row_sums,
                self.inputs.custom_mask, self.scale, self.pool.page_size,
                self.inputs.tokens_per_request, self.options.get("window", 0),
                self.options.get("softcap", 0.0), self.options.get("sinks_N"), None, None,
                self.options.get("chunked", False), False, self.row_invariant)  # fmt: skip


class CalledOps(TorchDispatchMode):
    """Notes the name of each op that is called within it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def called_ops():
    """Return a context that has the ``names`` of the ops that are called within it."""
    return CalledOps()


@pytest.fixture(params=[SdpaAttention, TritonAttention])
def backend_type(request):
    """Each backend."""
    return request.param


@pytest.fixture
def make_case():
    """``make_case(lengths, width=..., ...)`` builds a :class:`Case`."""

    def make(lengths, seed=0, row_invariant=True, **given):
        case = Case(**vars(AttentionCase(lengths, **given).batch(seed)))
        case.row_invariant = row_invariant
        return case

    return make


@pytest.fixture
def assert_attends():
    """``assert_attends(out, case)`` compares the live rows with the loops."""

    def check(out: torch.Tensor, case: Case, tolerance: float = 2e-5) -> None:
        assert out.shape == (*case.query.shape[:2], case.value.shape[2])
        assert out.dtype == case.query.dtype
        live = out[: case.live_rows].double().cpu()
        torch.testing.assert_close(live, case.expected(), atol=tolerance, rtol=tolerance)

    return check
