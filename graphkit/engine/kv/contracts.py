"""Interfaces of the KV pool and of the table of its slots that a step works with, and their checks.

``MHATokenToKVPool`` and ``ReqToTokenPool`` implement them. Pools of another engine may do so, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from graphkit.config import is_int
from graphkit.errors import ConfigError, short_repr
from graphkit.spec.signatures import signature_mismatch


class KVPool(Protocol):
    """Keys and values of all layers of a model by slot.

    Slots ``page_size`` to ``page_size + size - 1`` are for tokens. The first page is the dummy that
    pad rows write to and read from. Tensors keep their addresses for the life of the pool.

    Attributes:
        size: Tokens that the pool holds.
        page_size: Slots per page.
    """

    size: int
    page_size: int

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return every buffer by name, ``[slots, ...]`` with at least ``size + page_size`` slots.

        Checks and audits save, compare and restore them.
        """

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy slots ``src_loc`` to slots ``tgt_loc`` in every buffer of every layer.

        A step moves the accepted path of each draft tree to the front of its slots. Sources and
        targets may overlap: read every source before any target is written. Must only enqueue work
        on the current stream, since it is captured.

        Shapes:
            tgt_loc, src_loc: one shape, int64. Slot 0 is its own source where nothing moves.
        """


class RequestTable(Protocol):
    """KV slot of each token of each request. A step reads the row of each of its requests.

    Row 0 belongs to pad rows and holds slot 0. The tensor keeps its address for the life of the
    table.

    Attributes:
        size: Requests that may run at once; their rows are 1 to ``size``.
        max_context_len: Most tokens of one request, drafts included.
        req_to_token: [size + 1, max_context_len] int32 or int64.
    """

    size: int
    max_context_len: int
    req_to_token: torch.Tensor


class RequestPool(RequestTable, Protocol):
    """A ``RequestTable`` whose rows ``SpeculativeEngine`` allocates, as ``ReqToTokenPool``.

    A scheduler around ``SpecStepRunner`` allocates rows itself and needs a ``RequestTable`` only.

    Attributes:
        device: Device of the table.
    """

    device: torch.device

    @property
    def available(self) -> int:
        """Number of free rows."""

    def alloc(self, n: int) -> list[int]:
        """Allocate ``n`` rows and return them; ``n`` is at most ``available``."""

    def free(self, rows: Iterable[int]) -> None:
        """Make rows of ``alloc`` free again."""


def _is_count(value: object) -> bool:
    return is_int(value) and value >= 1


_METHOD = callable, "a method"
_MEMBERS: dict[type, dict[str, tuple[Callable[[Any], bool], str]]] = {
    KVPool: {
        "size": (_is_count, "an int >= 1, the number of tokens that it holds"),
        "page_size": (_is_count, "an int >= 1, its slots per page"),
        "tensors": _METHOD,
        "move_kv_cache": _METHOD,
    },
    RequestTable: {
        "size": (_is_count, "an int >= 1, the number of requests that may run at once"),
        "max_context_len": (_is_count, "an int >= 1, the most tokens of one request"),
    },
    RequestPool: {
        "available": (is_int, "the number of free rows"),
        "device": (lambda value: isinstance(value, torch.device), "the torch.device of the table"),
        "alloc": _METHOD,
        "free": _METHOD,
    },
}
"""Members of each interface: whether a value is valid, and what is expected."""


def check_kv_pool(owner: str, pool: object) -> None:
    """Check that an object is a ``KVPool``.

    Args:
        owner: Name of the argument or attribute, for messages.
        pool: The object.

    Raises:
        ConfigError: A member is missing or has the wrong type, or a buffer has too few slots.
    """
    _check_members(owner, pool, KVPool)
    slots, buffers = pool.size + pool.page_size, pool.tensors()  # type: ignore[attr-defined]
    if not isinstance(buffers, Mapping):
        raise _member_error(owner, pool, "tensors()", "tensors by name", buffers, KVPool)
    for name, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor):
            raise _member_error(owner, pool, f"tensors()[{name!r}]", "a tensor", buffer, KVPool)
        if not buffer.ndim or buffer.shape[0] < slots:
            raise ConfigError(
                f"{owner}.tensors()[{name!r}] has shape {tuple(buffer.shape)}, expected at least "
                f"size + page_size = {slots} slots as the first dimension. Put slots first, and "
                "add a page for pad rows. See graphkit.KVPool.",
                field=owner.rpartition(".")[2],
            )
        _check_no_inference(f"{owner}.tensors()[{name!r}]", buffer)


def check_request_table(owner: str, table: object) -> None:
    """Check that an object is a ``RequestTable``; arguments and errors as for ``check_kv_pool``."""
    _check_members(owner, table, RequestTable)
    rows, columns = table.size + 1, table.max_context_len  # type: ignore[attr-defined]
    slots = getattr(table, "req_to_token", None)
    fits = (
        isinstance(slots, torch.Tensor)
        and slots.dtype in (torch.int32, torch.int64)
        and slots.ndim == 2
        and slots.shape[0] >= rows
        and slots.shape[1] >= columns
    )
    if not fits:
        expected = f"a tensor [size + 1, max_context_len] = [{rows}, {columns}] int32 or int64"
        raise _member_error(owner, table, "req_to_token", expected, slots, RequestTable)
    _check_no_inference(f"{owner}.req_to_token", slots)  # type: ignore[arg-type]  # a tensor


def _check_no_inference(owner: str, tensor: torch.Tensor) -> None:
    if tensor.is_inference():
        raise ConfigError(
            f"{owner} was created under torch.inference_mode, so that it cannot be written outside "
            "of it. Create it outside, or under torch.no_grad.",
            field=owner.split(".")[-2],
        )


def check_request_pool(owner: str, pool: object) -> RequestPool:
    """Return an object that is a ``RequestPool``; arguments and errors as for ``check_kv_pool``."""
    check_request_table(owner, pool)
    _check_members(owner, pool, RequestPool)
    return pool  # type: ignore[return-value]  # checked


def require_device(owner: str, device: object) -> torch.device:
    """Return the device that a setting names."""
    if isinstance(device, (str, torch.device)):
        try:
            return torch.device(device)
        except RuntimeError:
            pass
    raise ConfigError(
        f"{owner}.device must be a torch.device or a name such as 'cuda:0', got "
        f"{short_repr(device)}.",
        field="device",
    )


def _check_members(owner: str, pool: object, contract: type) -> None:
    for name, (is_valid, expected) in _MEMBERS[contract].items():
        value = getattr(pool, name, None)
        if not is_valid(value):
            raise _member_error(owner, pool, name, expected, value, contract)
        if callable(value) and (mismatch := signature_mismatch(pool, name, contract)):
            raise ConfigError(f"{owner}: {mismatch}", field=owner.rpartition(".")[2])


def _member_error(
    owner: str, pool: object, member: str, expected: str, value: object, contract: type
) -> ConfigError:
    if value is None:
        actual = "missing"
    elif isinstance(value, torch.Tensor):
        actual = f"{tuple(value.shape)} {value.dtype}"
    elif isinstance(value, int):
        actual = repr(value)
    else:
        actual = f"a {type(value).__name__}"
    return ConfigError(
        f"{owner} is a {type(pool).__name__}, whose {member} is {actual}: expected {expected}. "
        f"Pass a pool of graphkit, or implement graphkit.{contract.__name__}.",
        field=owner.rpartition(".")[2],
    )
