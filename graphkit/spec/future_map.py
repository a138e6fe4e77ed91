"""Where one step leaves its results on the device for the next one to pick up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class FutureMap:
    """Device tensors indexed by request row, so that a later step needs no host round trip.

    Row 0 belongs to pad rows. A buffer is made the first time that its name is stashed, from the
    shape and dtype of what came.

    Args:
        max_running_requests: Request rows, row 0 not counted.
        chunked_prefill_size: Most tokens that one prefill chunk brings; kept for subclasses that
            relay them.
        context_len: Most tokens of one request; kept for the same reason.
        device: Where the buffers live.
        algorithm: The algorithm whose step results these are.
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
        self._buffers: dict[str, torch.Tensor] = {}

    def stash(self, req_pool_indices: torch.Tensor, results: Mapping[str, torch.Tensor]) -> None:
        """Keep each result's row i under request row ``req_pool_indices[i]``.

        Enqueues on the current stream and never synchronises.

        Shapes:
            req_pool_indices: [B] int64.
            results[name]: [B, ...].
        """
        for name, rows in results.items():
            if name not in self._buffers:
                shape = (self.max_running_requests + 1, *rows.shape[1:])
                self._buffers[name] = rows.new_zeros(shape)
            self._buffers[name].index_copy_(0, req_pool_indices, rows)

    def resolve(self, name: str, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """The rows stashed under ``name`` for these requests, [B, ...].

        Raises:
            KeyError: Nothing was ever stashed under that name.
        """
        return self._buffers[name].index_select(0, req_pool_indices)
