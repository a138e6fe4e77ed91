"""Who uses a pool: one engine, which allocates its rows and slots, or runners of one caller."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from weakref import WeakValueDictionary

from graphkit.errors import ConfigError


class PoolUse:
    """The use of pools by an engine or a runner, until ``end`` or until the object is gone.

    An engine allocates rows and slots of its pools by itself. Two engines would allocate the same
    ones, so an engine is the only user of its pools. Runners leave rows and slots to their caller,
    who may use several runners over one pool.

    Args:
        user: Name of the user's class.
        pools: Its pools, of any class.
        allocates: Whether the user allocates rows and slots.

    Attributes:
        user: As passed.
        pools: As passed.
        allocates: As passed.

    Raises:
        ConfigError: See ``check_unused``.
    """

    def __init__(self, user: str, pools: Iterable[object], *, allocates: bool) -> None:
        self.user, self.pools, self.allocates = user, tuple(pools), allocates
        check_unused(user, self.pools, allocates=allocates)
        _OPEN[id(self)] = self

    def end(self) -> None:
        """Let others use the pools. May be called repeatedly."""
        _OPEN.pop(id(self), None)


_OPEN: WeakValueDictionary[int, PoolUse] = WeakValueDictionary()
"""All uses that have not ended, by id."""


def check_unused(user: str, pools: Iterable[object], *, allocates: bool) -> None:
    """Check that nothing else allocates from pools.

    Args:
        user: Name of the class that is going to use them.
        pools: The pools.
        allocates: Whether the user allocates rows and slots.

    Raises:
        ConfigError: An open engine uses a pool, or the user is an engine and anything uses it.
    """
    for pool in pools:
        if _other_user(pool, allocates) is not None:
            gc.collect()  # a user may have been dropped in a reference cycle
        other = _other_user(pool, allocates)
        if other is not None:
            raise ConfigError(
                f"{user} cannot use this {type(pool).__name__}: an open {other.user} uses it, and "
                f"{'both' if other.allocates and allocates else 'the engine'} would allocate rows "
                f"and KV slots that the other one writes to. Close the {other.user} first, or "
                "create pools for each.",
                field="target",
            )


def _other_user(pool: object, allocates: bool) -> PoolUse | None:
    uses = [use for reference in _OPEN.valuerefs() if (use := reference()) is not None]
    for use in uses:
        if (allocates or use.allocates) and any(pool is other for other in use.pools):
            return use
    return None
