"""The captured batch sizes, and the lookup from a live batch to its captured size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphkit.config import is_int, require_int
from graphkit.errors import ConfigError, SizeError, short_repr


def default_batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Return the sizes that are captured by default, ascending.

    1 to 8 by 1, 10 to 32 by 2, 40 to 64 by 4, 72 to 256 by 8, then by 16, and ``max_batch_size``.
    These are SGLang's defaults for speculative decoding: dense where padding costs the largest
    share of a batch, and sparser than for plain decoding, because each graph is larger.
    """
    sizes = [
        *range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8),
        *range(272, max_batch_size + 1, 16),
    ]  # fmt: skip
    return (*[size for size in sizes if size < max_batch_size], max_batch_size)


class SizeTable:
    """The captured batch sizes of a runner.

    Immutable. Iterating gives the sizes, ascending; ``len`` their number.

    Args:
        max_batch_size: Largest live batch, in requests.
        batch_sizes: Sizes to capture, in requests; ``None`` selects ``default_batch_sizes``.
            ``max_batch_size`` is always added, so that every live batch has a size.
        multiple_of: Every size is rounded up to a multiple of it, for models that shard or align
            rows.

    Attributes:
        sizes: The captured sizes, ascending.
        max_batch_size, multiple_of: As passed.

    Raises:
        ConfigError: A size is not an int from 1 to ``max_batch_size``, or occurs twice.
    """

    def __init__(
        self,
        max_batch_size: int,
        batch_sizes: Iterable[int] | None = None,
        *,
        multiple_of: int = 1,
    ) -> None:
        require_int("SizeTable", "max_batch_size", max_batch_size)
        require_int("SizeTable", "multiple_of", multiple_of)
        self.max_batch_size = max_batch_size
        self.multiple_of = multiple_of
        chosen: object = batch_sizes
        if batch_sizes is None:
            chosen = default_batch_sizes(max_batch_size)
        if isinstance(chosen, str) or not isinstance(chosen, Iterable):
            raise ConfigError(
                f"batch_sizes must be an iterable of ints, got {short_repr(chosen)}.",
                field="batch_sizes",
            )
        wanted = {*self._checked(list(chosen)), max_batch_size}
        self.sizes = tuple(sorted({-(-size // multiple_of) * multiple_of for size in wanted}))
        self._fit = self._lookup()

    def _checked(self, sizes: list[int]) -> list[int]:
        for size in sizes:
            if type(size) is not int or size < 1:
                raise ConfigError(
                    f"batch_sizes must hold ints >= 1, got {short_repr(size)}.", field="batch_sizes"
                )
            if size > self.max_batch_size:
                raise ConfigError(
                    f"batch_sizes holds {size}, but max_batch_size is {self.max_batch_size}. "
                    "Remove it, or raise BufferSizes.max_batch_size.",
                    field="batch_sizes",
                )
        if len(set(sizes)) != len(sizes):
            raise ConfigError(
                f"batch_sizes holds a size twice: {sizes}. Name each once.", field="batch_sizes"
            )
        return sizes

    def _lookup(self) -> tuple[int, ...]:
        """Return the captured size of each live size, from the idle batch's 0 on."""
        fit = [0]
        for size in self.sizes:
            fit += [size] * (size - len(fit) + 1)
        assert len(fit) > self.max_batch_size, "a live batch has no captured size"
        return tuple(fit)

    @property
    def largest(self) -> int:
        """Largest captured size; at least ``max_batch_size``."""
        return self.sizes[-1]

    def fits(self, batch_size: int) -> bool:
        """Return whether a captured size holds ``batch_size`` requests.

        Raises:
            ConfigError: ``batch_size`` is not an int of at least 0.
        """
        if not is_int(batch_size) or batch_size < 0:
            raise ConfigError(
                f"batch_size must be an int >= 0, got {short_repr(batch_size)}.", field="batch_size"
            )
        return batch_size <= self.largest

    def fit(self, batch_size: int) -> int:
        """Return the smallest captured size that holds a batch, or 0 for an empty batch.

        Args:
            batch_size: Live requests.

        Raises:
            ConfigError: ``batch_size`` is not an int of at least 0.
            SizeError: The batch is larger than the largest size.
        """
        if not self.fits(batch_size):
            raise SizeError(
                f"batch of {batch_size} requests has no captured size: largest is {self.largest}. "
                "Raise BufferSizes.max_batch_size, or call run(), which falls back to eager.",
                batch_size=batch_size,
                largest=self.largest,
            )
        return self._fit[batch_size]

    def subset(self, batch_sizes: object) -> SizeTable:
        """Return a table of some of the sizes.

        Raises:
            ConfigError: There is none, or one is not in this table.
        """
        chosen = list(batch_sizes) if isinstance(batch_sizes, Iterable) else []
        if not chosen or any(size not in self.sizes for size in chosen):
            raise ConfigError(
                f"batch_sizes must be some of {list(self)}, got {short_repr(batch_sizes)}.",
                field="batch_sizes",
            )
        return SizeTable(max(chosen), chosen)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        return f"SizeTable({list(self.sizes)})"
