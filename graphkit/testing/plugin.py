"""The pytest plugin: a fixture, and ``pytest --graphkit package.module:attribute``.

pytest loads this module in every run where graphkit is installed, so it imports torch only on use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from graphkit.runners import Runner
    from graphkit.runners.targets import CaptureTarget


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("graphkit", "replay equivalence of captured models")
    group.addoption(
        "--graphkit",
        action="append",
        default=[],
        metavar="PACKAGE.MODULE:ATTRIBUTE",
        help="a graphkit.CaptureTarget, or a function that returns one: adds a test per mode, "
        "captured size and property; other tests are collected only from given paths; may be "
        "repeated",
    )
    group.addoption(
        "--graphkit-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device of --graphkit",
    )
    group.addoption(
        "--graphkit-tolerance",
        type=float,
        default=1.0,
        metavar="X",
        help="multiple of the usual rounding of the dtype that --graphkit allows, as graphkit "
        "audit --tolerance; default: 1",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect no other tests if a target but no path is given."""
    if config.option.graphkit and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []


@pytest.hookimpl(tryfirst=True)  # before -k and -m select
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add the tests of every target."""
    for text in session.config.option.graphkit:
        from graphkit.audit.kit.collection import TargetCollector

        collector = TargetCollector.from_parent(session, name=text, nodeid=text)
        items.extend(session.genitems(collector))


@pytest.fixture
def replay_equivalence() -> Callable[..., None]:
    """Return a function that fails unless replays agree with the step without graph and padding.

    ``replay_equivalence(runner, batches)`` is ``graphkit.testing.assert_replay_equivalent``;
    ``replay_equivalence(target)`` is ``assert_target_equivalent``, which captures every mode.
    """
    from graphkit.audit.kit.equivalence import assert_replay_equivalent, assert_target_equivalent
    from graphkit.runners import Runner

    def check(subject: Runner[Any, Any] | CaptureTarget, *batches: Any, **options: Any) -> None:
        if isinstance(subject, Runner):
            assert_replay_equivalent(subject, *batches, **options)
        else:
            assert_target_equivalent(subject, *batches, **options)

    return check
