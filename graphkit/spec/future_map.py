"""Where one step leaves its results on the device for the next one to pick up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphkit.errors import InputError, ReplayError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class FutureMap:
    """Device tensors indexed by request row, so that a later step needs no host round trip.

    Row 0 belongs to pad rows. A buffer is made the first time that its name is stashed, from the
    shape and dtype of what came. Both verbs enqueue on the current stream and never synchronise,
    unless ``debug`` is set.

    Args:
        max_running_requests: Request rows, row 0 not counted.
        chunked_prefill_size: Most tokens that one prefill chunk brings; kept for subclasses that
            relay them.
        context_len: Most tokens of one request; kept for the same reason.
        device: Where the buffers live.
        algorithm: The algorithm whose step results these are.

    Attributes:
        debug: Whether each result may be picked up once only; a second time, or before it was
            stashed, then raises. Waits for the device at every pick-up. Set it before the first
            result comes.
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
        """Keep each result's row i under request row ``req_pool_indices[i]``.

        Shapes:
            req_pool_indices: [B] int64; B may be 0.
            results[name]: [B, ...].

        Raises:
            InputError: A result has not a row per request, or other rows than at first.
        """
        for name, rows in results.items():
            self._check(name, req_pool_indices, rows)
            if name not in self._buffers:
                shape = (self.max_running_requests + 1, *rows.shape[1:])
                self._buffers[name] = rows.new_zeros(shape)
                self._fresh[name] = req_pool_indices.new_zeros(shape[0])
            self._buffers[name].index_copy_(0, req_pool_indices, rows)
            if self.debug:
                self._fresh[name].index_fill_(0, req_pool_indices, 1)

    def resolve(self, name: str, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """The rows stashed under ``name`` for these requests, [B, ...]; a copy.

        Raises:
            ReplayError: Nothing was ever stashed under that name; or, in debug, not since a row
                was last picked up.
        """
        if name not in self._buffers:
            known = ", ".join(self._buffers) or "nothing"
            raise ReplayError(
                f"FutureMap has no {name!r}: {known} was stashed. Stash before you resolve."
            )
        if self.debug:
            self._consume(name, req_pool_indices)
        return self._buffers[name].index_select(0, req_pool_indices)

    def _check(self, name: str, req_pool_indices: torch.Tensor, rows: torch.Tensor) -> None:
        kept, requests = self._buffers.get(name, rows), len(req_pool_indices)
        if (len(rows), *rows.shape[1:]) != (requests, *kept.shape[1:]) or rows.dtype != kept.dtype:
            raise InputError(
                f"FutureMap result {name!r} is {tuple(rows.shape)} {rows.dtype} for {requests} "
                f"requests. Stash {(requests, *kept.shape[1:])} {kept.dtype}.",
                field=name,
            )
        if self.debug:
            self._check_rows(req_pool_indices)

    def _check_rows(self, req_pool_indices: torch.Tensor) -> None:
        rows = req_pool_indices.tolist()
        if any(not 0 <= row <= self.max_running_requests for row in rows):
            raise InputError(
                f"FutureMap has rows 0 to {self.max_running_requests}, got {rows}. Make it for as "
                "many requests as the request pool has rows.",
                field="req_pool_indices",
            )

    def _consume(self, name: str, req_pool_indices: torch.Tensor) -> None:
        self._check_rows(req_pool_indices)
        wanted = req_pool_indices.bincount(minlength=self.max_running_requests + 1)
        wanted[0] = 0
        stale = (wanted > self._fresh[name]).nonzero()[:, 0].tolist()
        if stale:
            raise ReplayError(
                f"FutureMap rows {stale} of {name!r} were picked up already, or never stashed. "
                "Pick each result up once, after the step that makes it."
            )
        self._fresh[name].index_fill_(0, req_pool_indices, 0)
