"""What ``pytest --graphkit`` collects: a target, its modes, and a test per size and property.

A mode is captured when its first test begins, and closed behind its last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from graphkit.errors import GraphkitError
from graphkit.graphs import SizeTable, resolve_device
from graphkit.spec import ForwardMode
from graphkit.targets import CaptureTarget, locate
from graphkit.testing.properties import PROPERTIES, CapturedMode


class TargetCollector(pytest.Collector):
    """A target; its name is the text that names it."""

    def collect(self) -> Iterator[pytest.Collector]:
        """Its modes."""
        try:
            device = str(resolve_device(self.config.option.graphkit_device))
            target = locate(self.name, device)
        except GraphkitError as error:
            raise self.CollectError(str(error)) from error
        for mode in target.forwards:
            yield ModeCollector.from_parent(
                self, name=mode.name, target=target, mode=mode, device=device
            )


class ModeCollector(pytest.Collector):
    """A mode of a target.

    Attributes:
        captured: While its tests run.
    """

    captured: CapturedMode

    def __init__(
        self, *, target: CaptureTarget, mode: ForwardMode, device: str, **facts: Any
    ) -> None:
        super().__init__(**facts)
        self._target, self._mode, self._device = target, mode, device

    def collect(self) -> Iterator[pytest.Item]:
        """A test per property and size."""
        table = SizeTable(self._target.sizes.max_batch_size, self._target.batch_sizes)
        for size in table:
            for name in PROPERTIES:
                yield PropertyItem.from_parent(self, name=f"{name}[{size}]", of=name, size=size)

    def setup(self) -> None:
        """Capture."""
        wanted = {item.of for item in self._items() if item.parent is self}
        self.captured = CapturedMode(self._target, self._mode, self._device, wanted)
        if self.captured.eager_reason:
            pytest.skip(self.captured.eager_reason)

    def teardown(self) -> None:
        """Give the graphs back."""
        if hasattr(self, "captured"):
            self.captured.close()

    def _items(self) -> Iterator[PropertyItem]:
        return (item for item in self.session.items if isinstance(item, PropertyItem))


class PropertyItem(pytest.Item):
    """One property at one captured size.

    Attributes:
        of: The property's name.
    """

    parent: ModeCollector

    def __init__(self, *, of: str, size: int, **facts: Any) -> None:
        super().__init__(**facts)
        self.of, self._size = of, size

    def runtest(self) -> None:
        """Fail with what is wrong."""
        self.parent.captured.check(self.of, self._size)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *rest: Any) -> Any:
        """What is wrong is all there is to say; where it was found out says nothing."""
        if isinstance(excinfo.value, (AssertionError, GraphkitError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *rest)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """The heading of a failure."""
        return self.path, None, self.nodeid.replace("::", " ")
