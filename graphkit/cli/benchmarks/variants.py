"""Ways to run the same steps: generations, and loops of different lengths."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

_LAUNCHES_IN_FLIGHT = 2
"""Most launches of a generation that have begun and are not read."""
Generation = Literal["v1", "v2", "v3"]
"""Generation of steps: host in the loop, overlapped, on the device."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run steps.

    Attributes:
        name: Its name in reports.
        generation: As for ``SpeculativeEngine``.
        steps_per_launch: Most steps of one launch of v3; 1 in the other generations.
    """

    name: str
    generation: Generation
    steps_per_launch: int = 1

    @property
    def steps_in_flight(self) -> int:
        """Most steps that are enqueued and not delivered when a step of the engine returns."""
        return _LAUNCHES_IN_FLIGHT * self.steps_per_launch

    @property
    def steps_ahead(self) -> int:
        """Steps that are enqueued and not delivered when a launch has been delivered whole."""
        return 0 if self.generation == "v1" else self.steps_per_launch

    def whole_launches(self, steps: int) -> int:
        """Return the steps of the fewest launches that run at least ``steps`` steps."""
        return -(-steps // self.steps_per_launch) * self.steps_per_launch


def make_variants(
    generations: Collection[Generation], steps_per_launch: Sequence[int]
) -> Iterator[Variant]:
    """Yield v1 and v2 as far as they are chosen, and for v3 each number of steps per launch."""
    for generation in ("v1", "v2"):
        if generation in generations:
            yield Variant(generation, generation)
    if "v3" in generations:
        for steps in steps_per_launch:
            yield Variant("one launch" if steps == 1 else f"loop of {steps}", "v3", steps)
