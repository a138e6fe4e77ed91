"""Device memory that keeps the results of one step for the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphkit.errors import InputError, ReplayError, short_repr

if TYPE_CHECKING:
    import torch


class FutureMap:
    """Device tensors indexed by request row, so that a later step needs no host round trip.

    Row 0 belongs to pad rows. A buffer is allocated the first time that its name is stashed, with
    the shape and dtype of the result. Both methods enqueue on the current stream and never
    synchronise, unless ``debug`` is set.

    Args:
        max_running_requests: Request rows, row 0 excluded.
        chunked_prefill_size: Most tokens of one prefill chunk; for subclasses that keep prefill
            results.
        context_len: Most tokens of one request; for subclasses.
        device: Device of the buffers.
        algorithm: The algorithm whose results these are.

    Attributes:
        debug: If True, resolving a result twice, or before it was stashed, raises. Every
            ``resolve`` then waits for the device. Set it before the first ``stash``.
    """

    def __init__(
        self,
        max_running_requests: int,
        chunked_prefill_size: int,
        context_len: int,
        device: torch.device | str,
        algorithm: Any,
    ) -> None:
        self.max_running_requests = max_running_requests
        self.chunked_prefill_size = chunked_prefill_size
        self.context_len = context_len
        self.device = device
        self.algorithm = algorithm
        self.debug = False
        self._buffers: dict[str, torch.Tensor] = {}
        self._fresh: dict[str, torch.Tensor] = {}

    def stash(self, req_pool_indices: torch.Tensor, results: Mapping[str, torch.Tensor]) -> None:
        """Store each result's row i under request row ``req_pool_indices[i]``.

        Shapes:
            req_pool_indices: [B] int64; B may be 0.
            results[name]: [B, ...].

        Raises:
            InputError: ``req_pool_indices`` is not an int64 tensor [B], a result is not a tensor or
                does not have a row per request, or its rows differ in shape or dtype from the first
                ones of that name.
        """
        self._check_indices(req_pool_indices)
        if not isinstance(results, Mapping):
            raise InputError(
                f"FutureMap.stash got a {type(results).__name__}, expected tensors by name.",
                field="results",
            )
        from graphkit.ops.rows import scatter_rows  # imports torch

        for name, rows in results.items():
            self._check(name, req_pool_indices, rows)
            if name not in self._buffers:
                self._add(name, req_pool_indices, rows)
        buffers = [self._buffers[name] for name in results]
        scatter_rows(buffers, list(results.values()), req_pool_indices)
        if self.debug:
            for name in results:
                self._fresh[name].index_fill_(0, req_pool_indices, 1)

    def _add(self, name: str, req_pool_indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Allocate the buffer of a name."""
        from graphkit.ops.inference import allocates  # imports torch

        shape = (self.max_running_requests + 1, *rows.shape[1:])
        self._buffers[name] = allocates(rows.new_zeros)(shape)
        self._fresh[name] = allocates(req_pool_indices.new_zeros)(shape[0])

    def resolve(self, name: str, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows stashed under ``name`` for these requests, [B, ...].

        Raises:
            InputError: ``req_pool_indices`` is not an int64 tensor [B].
            ReplayError: Nothing was stashed under that name or, in debug, not since a row was last
                resolved.
        """
        from graphkit.ops.rows import gather_rows  # imports torch

        self._check_indices(req_pool_indices)
        if type(name) is not str or name not in self._buffers:
            known = ", ".join(self._buffers) or "nothing"
            raise ReplayError(
                f"FutureMap has no {name!r}: {known} was stashed. Call stash before resolve."
            )
        if self.debug:
            self._consume(name, req_pool_indices)
        return gather_rows(self._buffers[name], req_pool_indices)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the buffer of each name stashed so far, [rows + 1, ...]."""
        return dict(self._buffers)

    def _check_indices(self, req_pool_indices: torch.Tensor) -> None:
        # By name, since torch is not imported here.
        is_int64 = str(getattr(req_pool_indices, "dtype", None)) == "torch.int64"
        if is_int64 and req_pool_indices.ndim == 1:
            return
        raise InputError(
            f"FutureMap got request rows {short_repr(req_pool_indices)}, expected an int64 "
            "tensor [B].",
            field="req_pool_indices",
        )

    def _check(self, name: str, req_pool_indices: torch.Tensor, rows: torch.Tensor) -> None:
        if not hasattr(rows, "new_zeros"):  # torch is not imported here
            raise InputError(
                f"FutureMap result {name!r} is {type(rows).__name__}, expected a tensor with one "
                "row per request.",
                field=name,
            )
        kept, requests = self._buffers.get(name, rows), len(req_pool_indices)
        if tuple(rows.shape) != (requests, *kept.shape[1:]) or rows.dtype != kept.dtype:
            raise InputError(
                f"FutureMap result {name!r} is {tuple(rows.shape)} {rows.dtype} for {requests} "
                f"requests, expected {(requests, *kept.shape[1:])} {kept.dtype}.",
                field=name,
            )
        if self.debug:
            self._check_rows(req_pool_indices)

    def _check_rows(self, req_pool_indices: torch.Tensor) -> None:
        rows = req_pool_indices.tolist()
        if any(not 0 <= row <= self.max_running_requests for row in rows):
            raise InputError(
                f"FutureMap has rows 0 to {self.max_running_requests}, got {rows}. Construct it "
                "with the number of rows of the request pool.",
                field="req_pool_indices",
            )

    def _consume(self, name: str, req_pool_indices: torch.Tensor) -> None:
        self._check_rows(req_pool_indices)
        wanted = req_pool_indices.bincount(minlength=self.max_running_requests + 1)
        wanted[0] = 0
        stale = (wanted > self._fresh[name]).nonzero()[:, 0].tolist()
        if stale:
            raise ReplayError(
                f"FutureMap rows {stale} of {name!r} were already resolved, or never stashed. "
                "Resolve each result once, after the step that computes it."
            )
        self._fresh[name].index_fill_(0, req_pool_indices, 0)
