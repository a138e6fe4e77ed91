"""Who uses a pool: one engine, which allocates its rows and slots, or runners of one caller."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from weakref import WeakSet

from graphkit.errors import ConfigError


class TrackedPool:
    """Base class of pools. ``uses`` are the open engines and runners over the pool."""

    def __init__(self) -> None:
        self.uses: WeakSet[PoolUse] = WeakSet()


class PoolUse:
    """The use of pools by an engine or a runner, until ``end`` or until the object is gone.

    An engine allocates rows and slots of its pools by itself. Two engines would allocate the same
    ones, so an engine is the only user of its pools. Runners leave rows and slots to their caller,
    who may use several runners over one pool.

    Args:
        user: Name of the user's class.
        pools: Its pools. Other objects are skipped.
        allocates: Whether the user allocates rows and slots.

    Attributes:
        user: As passed.
        allocates: As passed.

    Raises:
        ConfigError: See ``check_unused``.
    """

    def __init__(self, user: str, pools: Iterable[object], *, allocates: bool) -> None:
        self.user, self.allocates = user, allocates
        self._pools = [pool for pool in pools if isinstance(pool, TrackedPool)]
        check_unused(user, self._pools, allocates=allocates)
        for pool in self._pools:
            pool.uses.add(self)

    def end(self) -> None:
        """Let others use the pools. May be called repeatedly."""
        for pool in self._pools:
            pool.uses.discard(self)


def check_unused(user: str, pools: Iterable[object], *, allocates: bool) -> None:
    """Check that nothing else allocates from pools.

    Args:
        user: Name of the class that is going to use them.
        pools: The pools. Other objects are skipped.
        allocates: Whether the user allocates rows and slots.

    Raises:
        ConfigError: An open engine uses a pool, or the user is an engine and anything uses it.
    """
    for pool in pools:
        if not isinstance(pool, TrackedPool):
            continue
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


def _other_user(pool: TrackedPool, allocates: bool) -> PoolUse | None:
    return next((use for use in pool.uses if allocates or use.allocates), None)
