"""Collection of ``pytest --graphkit``: a target, its modes, and a test per size and property.

A mode is captured before its first test and closed after its last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from graphkit.audit.kit.properties import CapturedMode, properties_of
from graphkit.audit.locate_target import locate
from graphkit.errors import GraphkitError
from graphkit.graphs import SizeTable, resolve_device
from graphkit.models.wrapper.comparison import check_wrapper
from graphkit.runners.comparison import check_tolerance
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode


class TargetCollector(pytest.Collector):
    """Collects a target. The collector's name is the TARGET of the command line."""

    def collect(self) -> Iterator[pytest.Collector | pytest.Item]:
        """Yield the modes, and a test against the model if the target declares one."""
        try:
            check_tolerance(self.config.option.graphkit_tolerance)
            device = str(resolve_device(self.config.option.graphkit_device))
            target = locate(self.name, device)
        except GraphkitError as error:
            raise self.CollectError(str(error)) from error
        for mode in target.modes:
            yield ModeCollector.from_parent(
                self, name=mode.name, target=target, mode=mode, device=device
            )
        if target.model is not None:
            yield WrapperItem.from_parent(self, name="wrapper", target=target, device=device)


class ModeCollector(pytest.Collector):
    """Collects the tests of a mode.

    Attributes:
        captured: The captured mode, while its tests run.
    """

    captured: CapturedMode

    def __init__(
        self, *, target: CaptureTarget, mode: ForwardMode, device: str, **facts: Any
    ) -> None:
        super().__init__(**facts)
        self._target, self._mode, self._device = target, mode, device

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test per property and size."""
        table = SizeTable(self._target.sizes.max_batch_size, self._target.batch_sizes)
        for size in table:
            for name in properties_of(self._target, self._mode):
                yield PropertyItem.from_parent(self, name=f"{name}[{size}]", of=name, size=size)

    def setup(self) -> None:
        """Capture the mode."""
        tolerance = self.config.option.graphkit_tolerance
        wanted = {item.of for item in self._items() if item.parent is self}
        self.captured = CapturedMode(self._target, self._mode, self._device, tolerance, wanted)
        if self.captured.eager_reason:
            pytest.skip(self.captured.eager_reason)

    def teardown(self) -> None:
        """Close the graphs."""
        if hasattr(self, "captured"):
            self.captured.close()

    def _items(self) -> Iterator[PropertyItem]:
        return (item for item in self.session.items if isinstance(item, PropertyItem))


class _TargetItem(pytest.Item):
    """A test of a target; its failures are texts."""

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *rest: Any) -> Any:
        """Return the text of a failed check alone: its traceback shows only graphkit's code."""
        if isinstance(excinfo.value, (AssertionError, GraphkitError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *rest)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Return the heading of a failure."""
        return self.path, None, self.nodeid.replace("::", " ")


class PropertyItem(_TargetItem):
    """Test of one property at one captured size.

    Attributes:
        of: Name of the property.
    """

    parent: ModeCollector

    def __init__(self, *, of: str, size: int, **facts: Any) -> None:
        super().__init__(**facts)
        self.of, self._size = of, size

    def runtest(self) -> None:
        """Check the property."""
        self.parent.captured.check(self.of, self._size)


class WrapperItem(_TargetItem):
    """Comparison of a target with its model."""

    def __init__(self, *, target: CaptureTarget, device: str, **facts: Any) -> None:
        super().__init__(**facts)
        self._target, self._device = target, device

    def runtest(self) -> None:
        """Compare the target with its model."""
        tolerance = self.config.option.graphkit_tolerance
        check_wrapper(self._target, device=self._device, tolerance=tolerance)
