"""Types of the numbers in records whose range a reader checks."""

from __future__ import annotations

from typing import Annotated

NON_NEGATIVE = "non-negative"
Count = Annotated[int, NON_NEGATIVE]
"""A number of things, an index or an address: at least 0."""
Duration = Annotated[float, NON_NEGATIVE]
"""A time: finite and at least 0."""
