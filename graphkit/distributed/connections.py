"""Process groups: creation, time limits, errors, and how to end collectives that wait.

torch ends no collective of gloo that waits, and ``ProcessGroup.abort`` of NCCL waits for captured
graphs; see ``break_gloo`` and ``abort_nccl``.

Private names of torch, checked on 2.13: ``_get_backend`` and ``_get_sequence_number_for_group`` of
process groups, ``_set_default_timeout`` of their backends, and ``_timeout`` of a backend's options.
``tests/unit/test_private_names.py`` names what another version changes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its __all__

from graphkit.errors import RankError, first_line
from graphkit.graphs import CapturedGraph
from graphkit.graphs.capture_failure import exception_chain

if TYPE_CHECKING:
    from graphkit.distributed.rank_store import Store

logger = logging.getLogger(__name__)
_AT_ONCE = timedelta(milliseconds=1)
"""Shortest time limit of gloo, which counts milliseconds."""
_TAG = 0x676B
"""Tag of the receive of ``break_gloo``: any number that no rank sends (0x676B is ``gk``)."""
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
_DESTROYED = (RuntimeError, ValueError, AssertionError)
"""Exceptions that a process group raises while another thread destroys it."""


def new_cpu_group(process_group: dist.ProcessGroup, seconds: float) -> dist.ProcessGroup:
    """Return a process group of the same ranks that uses gloo, with a time limit. Collective.

    Raises:
        RankError: A rank did not create it.
    """
    try:
        made = dist.new_group(
            dist.get_process_group_ranks(process_group),
            timeout=timedelta(seconds=seconds),
            backend="gloo",
            use_local_synchronization=True,
            group_desc="graphkit",
        )
    except RuntimeError as error:
        raise RankError(
            f"the ranks could not connect: {first_line(error)[:160]}. All ranks must create the "
            "same groups and engines in the same order.",
        ) from error
    assert isinstance(made, dist.ProcessGroup), "this process is a member"
    return made


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
    """Set the time limit of gloo collectives, unless theirs is shorter."""
    if not _uses_gloo(process_group):
        return
    backend = process_group._get_backend(torch.device("cpu"))
    limit = timedelta(seconds=seconds)
    if backend.options._timeout > limit:
        backend._set_default_timeout(limit)


def break_gloo(process_group: dist.ProcessGroup) -> None:
    """End all gloo collectives of this process, waiting and later ones, with an error.

    ``ProcessGroup.abort`` and ``shutdown`` do nothing with gloo. A receive that times out closes
    the connections to all ranks (``unbound_buffer.cc`` of gloo). Collectives of other ranks that
    need this one fail, too. Any thread may call this function.
    """
    if process_group.size() == 1 or not _uses_gloo(process_group):
        return
    other = (process_group.rank() + 1) % process_group.size()
    interfaces = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    for tag in range(_TAG, _TAG + interfaces):  # gloo has connections for each interface
        with suppress(RuntimeError):
            process_group.recv([torch.empty(1)], other, tag).wait(_AT_ONCE)


def abort_nccl(
    process_group: dist.ProcessGroup, drain_s: float, graphs: Iterable[CapturedGraph]
) -> None:
    """End all NCCL collectives of this process. They leave wrong results and raise no error.

    Does nothing with other process groups.

    ``ncclCommAbort`` ends the kernels that wait and then blocks until all graphs with collectives
    of the communicator are destroyed (``commDestroySync`` in NCCL's ``init.cc``). Meanwhile torch
    holds a lock that each further collective of the process group needs. This function therefore
    closes ``graphs`` while the abort runs. It returns when all other graphs with collectives of the
    process group are destroyed, too: call it on a thread that destroys none.

    Args:
        process_group: The process group.
        drain_s: Seconds in which collectives may end by themselves.
        graphs: Captured graphs that may have collectives of the process group.
    """

    def abort() -> None:
        with suppress(*_DESTROYED):
            process_group.abort()

    with suppress(*_DESTROYED):
        if uses_nccl(process_group):
            time.sleep(drain_s)
            logger.warning("Rank %d aborts its NCCL process group.", process_group.rank())
            thread = threading.Thread(target=abort, name="graphkit abort", daemon=True)
            thread.start()
            for graph in tuple(graphs):
                graph.close()
            thread.join()


def is_connection_error(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, was raised by a collective that failed."""
    return any(
        isinstance(raised, dist.DistError)
        or (type(raised) is RuntimeError and any(text in str(raised).lower() for text in _ERRORS))
        for raised in exception_chain(error)
    )


def rank_of_host(store: Store, process_group: dist.ProcessGroup) -> int | None:
    """Return the rank that hosts a store; ``None`` if none does. Collective, through gloo."""
    host = torch.tensor([process_group.rank() + 1 if _hosts(store) else 0])
    dist.all_reduce(host, dist.ReduceOp.MAX, group=process_group)
    return int(host) - 1 if host else None


def _hosts(store: Store) -> bool:
    """Return whether this process hosts a ``TCPStore``, which only its ``repr`` shows."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    text = repr(store)
    return "TCPServer(" in text or ("server=" in text and "server=<nullptr>" not in text)


def _uses_gloo(process_group: dist.ProcessGroup) -> bool:
    return is_open(process_group) and "gloo" in dist.get_backend_config(process_group)
