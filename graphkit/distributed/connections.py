"""Connections of a process group: their time limit, their errors, and how to break them.

Private names of torch, checked on 2.13: ``ProcessGroup._get_backend``,
``ProcessGroup._get_sequence_number_for_group`` and ``Backend._set_default_timeout``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its __all__

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, without its stub

_AT_ONCE = timedelta(milliseconds=1)
_TAG = 0x676B
"""A tag that programs hardly use, so that the receive of ``break_gloo`` finds no message."""
_ERRORS = (
    "gloo",
    "nccl",
    "application timeout caused pair closure",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "operation timed out",
)
"""Parts of messages, in lower case, of ``RuntimeError`` for a collective that did not complete."""


def is_open(process_group: dist.ProcessGroup) -> bool:
    """Return whether a process group has not been destroyed."""
    try:
        dist.get_backend(process_group)
    except (ValueError, AssertionError):
        return False
    return True


def uses_nccl(process_group: dist.ProcessGroup) -> bool:
    """Return whether collectives of a process group run on CUDA devices, through NCCL."""
    backend = dist.get_backend(process_group)  # "undefined" if torch chooses by device
    return "nccl" in backend or (backend == "undefined" and torch.cuda.is_available())


def num_collectives(process_group: dist.ProcessGroup) -> int:
    """Return the number of collectives that this process has started; 0 if it is not known."""
    try:
        count: int = process_group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except RuntimeError:  # of a group that chooses its backend by device
        return 0
    return count


def limit_gloo(process_group: dist.ProcessGroup, seconds: float) -> None:
    """Let the collectives of gloo wait for at most so many seconds, if their limit is longer."""
    if not _uses_gloo(process_group):
        return
    backend = process_group._get_backend(torch.device("cpu"))
    limit = timedelta(seconds=seconds)
    if backend.options._timeout > limit:
        backend._set_default_timeout(limit)


def break_gloo(process_group: dist.ProcessGroup) -> None:
    """End all collectives of gloo that wait in this process, and all later ones, with an error.

    ``ProcessGroup.abort`` and ``shutdown`` do nothing with gloo. A receive that times out closes
    the connections to all ranks, as gloo documents in ``unbound_buffer.cc``. Other ranks whose
    collectives need this one see the closed connection. May be called by any thread.
    """
    if process_group.size() == 1 or not _uses_gloo(process_group):
        return
    other = (process_group.rank() + 1) % process_group.size()
    interfaces = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    for tag in range(_TAG, _TAG + interfaces):  # gloo has connections for each interface
        with suppress(RuntimeError):
            process_group.recv([torch.empty(1)], other, tag).wait(_AT_ONCE)


def is_connection_error(error: BaseException) -> bool:
    """Return whether a collective failed because of another rank, or an error was raised by one."""
    return any(
        isinstance(each, dist.DistError)
        or (type(each) is RuntimeError and any(text in str(each).lower() for text in _ERRORS))
        for each in _chain(error)
    )


def hosts_store(store: Store) -> bool:
    """Return whether this process hosts a ``TCPStore``. Only its text says so."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    text = repr(store)
    return "TCPServer(" in text or ("server=" in text and "server=<nullptr>" not in text)


def _uses_gloo(process_group: dist.ProcessGroup) -> bool:
    return is_open(process_group) and "gloo" in dist.get_backend_config(process_group)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
