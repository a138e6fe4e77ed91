"""The versions of transformers that graphkit is tested with."""

from __future__ import annotations

import logging
import re

from graphkit.errors import ConfigError

OLDEST, NEWEST = (5, 17), (5, 24)
"""Major and minor number of the oldest and the newest version whose tests pass."""
RECURRENT = (5, 21)
"""The oldest version whose cache has the interface that recurrent layers need."""
logger = logging.getLogger(__name__)


def numbered(version: str) -> tuple[int, int]:
    """Return the major and the minor number of a version, such as (5, 24) of "5.24.0.dev0"."""
    major, minor, *_ = re.findall(r"\d+", version + ".0")
    return int(major), int(minor)


def check_version(version: str) -> None:
    """Refuse a version of transformers that is too old, and warn of one that is too new.

    Raises:
        ConfigError: The version is older than ``OLDEST``.
    """
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    advice = f"pip install 'transformers>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    if numbered(version) < OLDEST:
        raise ConfigError(
            f"transformers is {version}, but graphkit.models needs {oldest} or newer: it is tested "
            f"with {oldest} to {newest}. Install one of these: {advice}.",
            field="transformers",
        )
    if numbered(version) > NEWEST:
        logger.warning(
            "transformers is %s, but graphkit.models is tested with %s to %s. Every load compares "
            "the result with the model itself. If it is refused, install a tested version: %s.",
            version, oldest, newest, advice,
        )  # fmt: skip
