"""The shared tests of attention backends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from graphkit.audit.kit.attention_cases import AttentionBatch, AttentionCase
from graphkit.buffers import AttentionBackend
from graphkit.engine.kv import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from graphkit.errors import ConfigError, GraphkitError, short_repr
from graphkit.graphs import backend_for, resolve_device
from graphkit.spec import ForwardMode

_EXTENDED = AttentionCase([6, 0, 40], width=4, pads=1)
MODES = {
    "DECODE": AttentionCase([6, 1, 40], ForwardMode.DECODE, pads=2),
    "TARGET_VERIFY, chain": replace(_EXTENDED, pads=2),
    "TARGET_VERIFY, tree": replace(_EXTENDED, pads=2, tree=True),
    "DRAFT, tree": AttentionCase(
        [6, 4, 40], ForwardMode.DRAFT, width=2, columns=6, tree=True, pads=1
    ),
    "DRAFT_EXTEND": replace(_EXTENDED, mode=ForwardMode.DRAFT_EXTEND, rows=[1, 4, 2]),
    "DRAFT_EXTEND_V2": replace(_EXTENDED, mode=ForwardMode.DRAFT_EXTEND_V2),
}
"""Batches by name."""
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 7},
    "chunked": {"window": 7, "chunked": True},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": True},
}
"""Values of the options of ``attend``."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def attention_conformance(
    backend: Callable[..., Any],
    *,
    attend: Callable[..., torch.Tensor] | None = None,
    device: torch.device | str = "auto",
    dtype: torch.dtype = torch.float32,
    pools: Collection[type] | None = None,
    page_sizes: Sequence[int] = (1, 16),
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    latent_dims: tuple[int, int] = (32, 16),
    options: Collection[str] = tuple(OPTIONS),
    tolerance: float | None = None,
) -> list[str]:
    """Test that an attention backend computes what the runners rely on.

    In each mode that the backend supports, with each pool and page size, the results of random
    batches must equal those of plain loops in float64. The batches have pads, requests without
    history, and NaN in every slot that no row may read. In TARGET_VERIFY the backend is captured,
    and replays must follow their inputs; a backend that plans on the host is asked to plan before
    each. A class must refuse pools that it cannot read, by name.

    Args:
        backend: Makes an ``AttentionBackend``: a class such as ``TritonAttention``, or a function.
            Called as ``backend(req_to_token_pool, kv_pool, scale=...)``. The pools contain the
            histories of a batch. A function may copy them into pools of the backend's own:
            ``kv_pool.get_key_buffer(layer)`` and ``get_value_buffer(layer)``, for layers 0 and 1,
            and ``req_to_token_pool.req_to_token``. The page size, the context and the number of
            rows differ from test to test.
        attend: Stores the rows of a layer and attends from them: called as ``attend(backend, layer,
            query, key, value, out_cache_loc, metadata, **options)``, with arguments as for
            ``PagedAttention.attend``. ``None`` calls the method ``attend`` of the backend.
        device: As for a runner; on the CPU the recorder captures.
        dtype: Data type of queries, keys and values.
        pools: Pool types that it reads, of ``MHATokenToKVPool`` and ``MLATokenToKVPool``; by
            default its ``pool_types``, else the first.
        page_sizes: Slots per page.
        heads: Query heads.
        kv_heads: Key-value heads.
        head_dim: Elements per head.
        latent_dims: Elements of a latent and of the rotated part of a key.
        options: Options of ``attend`` that it takes, of ``window``, ``chunked``, ``softcap`` and
            ``sinks``.
        tolerance: Allowed absolute and relative difference; by default one that fits ``dtype``.

    Returns:
        The names of the tests, which all passed.

    Raises:
        AssertionError: Some test failed; the text has a line for each.
        ConfigError: An option, pool or dtype is unknown, or ``backend`` makes no
            ``AttentionBackend`` or one that needs ``attend``.
    """
    own: Collection[type] = getattr(backend, "pool_types", (MHATokenToKVPool,))
    readable = tuple(own if pools is None else pools)
    _require("options", set(options) <= set(OPTIONS), f"of {', '.join(OPTIONS)}", options)
    _require("dtype", dtype in TOLERANCES, "float32, float16 or bfloat16", dtype)
    known = {MHATokenToKVPool, MLATokenToKVPool}
    names = " and ".join(kind.__name__ for kind in (MHATokenToKVPool, MLATokenToKVPool))
    _require("pools", set(readable) <= known, f"of {names}", readable)
    common: dict[str, Any] = {"heads": heads, "dtype": dtype, "device": resolve_device(device)}
    sizes: dict[type, dict[str, Any]] = {
        MHATokenToKVPool: {**common, "kv_heads": kv_heads, "head_dim": head_dim},
        MLATokenToKVPool: {**common, "latent": latent_dims[0], "head_dim": sum(latent_dims)},
    }
    limit = TOLERANCES[dtype] if tolerance is None else tolerance
    tests: dict[str, Callable[[], None]] = {}
    for pool in readable:
        for page_size in page_sizes:
            cases = {
                name: replace(case, **sizes[pool], page_size=page_size)
                for name, case in MODES.items()
            }
            where = f"{pool.__name__}, page size {page_size}"
            for name, test in _Tested(backend, attend, limit).tests(cases, options):
                tests[f"{where}, {name}"] = test
    if isinstance(backend, type):
        others: dict[str, Any] = {
            pool.__name__: AttentionCase([1], **sizes[pool]).batch().pool
            for pool in known - set(readable)
        }
        requests = ReqToTokenPool(1, 1, common["device"])
        for name, other in {**others, "ReqToTokenPool": requests}.items():
            tests[f"refuses {name}"] = partial(_refuses, backend, requests, other)
    failures = [f"{name}: {text}" for name, test in tests.items() if (text := _failure(test))]
    if failures:
        raise AssertionError(
            f"{len(failures)} of {len(tests)} tests of the backend failed.\n" + "\n".join(failures)
        )
    return list(tests)


@dataclass(frozen=True, slots=True)
class _Tested:
    """A backend and its function ``attend``, and how much its results may differ."""

    backend: Callable[..., Any]
    attend: Callable[..., torch.Tensor] | None
    limit: float

    def tests(
        self, cases: Mapping[str, AttentionCase], options: Collection[str]
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the tests of a pool and page size by name."""
        probe = next(iter(cases.values())).batch().backend(self.backend)
        is_backend = isinstance(probe, AttentionBackend)
        expected = "a callable that returns a graphkit.AttentionBackend"
        _require("backend", is_backend, expected, probe)
        if self.attend is None and not callable(getattr(probe, "attend", None)):
            raise ConfigError(
                f"attention_conformance: {type(probe).__name__} has no method attend. Pass "
                "attend=, a function that stores the rows of a layer and attends from them.",
                field="attend",
            )
        for name, case in cases.items():
            if not probe.supports(case.mode):
                continue
            yield name, partial(self._computes, case)
            if case.mode is not ForwardMode.TARGET_VERIFY:
                continue
            for option in options:
                yield f"{name}, {option}", partial(self._computes, replace(case, **OPTIONS[option]))
            yield f"{name}, captured", partial(self._follows_inputs, case)

    def _computes(self, case: AttentionCase) -> None:
        batch = case.batch()
        made = batch.backend(self.backend)
        batch.prepare(made)
        self._compare(batch, batch.attend_by(made, self.attend))

    def _follows_inputs(self, case: AttentionCase) -> None:
        """Capture a batch, and replay it twice, each time with its requests in another order."""
        batch = replace(case, pads=0, lengths=[6, 11, 40]).batch()
        made, graphs = batch.backend(self.backend), backend_for(batch.query.device)
        batch.prepare(made)
        plan = getattr(made, "before_replay", None)

        def prepare() -> None:
            if plan is not None:
                plan(batch.mode, batch.inputs, batch.inputs.batch_size)

        attend = partial(batch.attend_by, made, self.attend)
        with graphs.session():
            prepare()
            graphs.warm_up(attend)
            graph = graphs.capture(attend, before_replay=prepare)
        try:
            for _ in range(2):
                batch.reorder([2, 0, 1])
                prepare()
                graph.replay()
                self._compare(batch, graph.output)
        finally:
            graph.close()

    def _compare(self, batch: AttentionBatch, out: torch.Tensor) -> None:
        live = out[: batch.live_rows].double().cpu()
        torch.testing.assert_close(live, batch.expected(), atol=self.limit, rtol=self.limit)


def _refuses(backend: Callable[..., Any], requests: ReqToTokenPool, pool: Any) -> None:
    """Check that a KV pool is refused, or a request pool in its place."""
    name = type(pool).__name__
    refusal = None
    try:
        backend(requests, pool, scale=1.0)
    except GraphkitError as error:
        refusal = str(error)
    if refusal is None:
        raise AssertionError(f"it accepts a {name}, which it cannot read: raise a GraphkitError")
    assert name in refusal, f"its refusal does not name {name}: {refusal}"


def _failure(test: Callable[[], None]) -> str:
    """Return why a test fails, in a line; empty if it passes."""
    try:
        test()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _require(field: str, holds: bool, expected: str, value: object) -> None:
    if not holds:
        raise ConfigError(
            f"attention_conformance: {field} must be {expected}, got {short_repr(value)}.",
            field=field,
        )
