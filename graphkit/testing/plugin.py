"""The pytest plugin: a fixture, and ``pytest --graphkit package.module:attribute``.

pytest loads this in every run of everyone who has graphkit, so it imports nothing heavy until it is
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from graphkit.runners import Runner
    from graphkit.targets import CaptureTarget


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("graphkit", "replay equivalence of captured models")
    group.addoption(
        "--graphkit",
        action="append",
        default=[],
        metavar="PACKAGE.MODULE:ATTRIBUTE",
        help="a graphkit.CaptureTarget, or what makes one: adds a test per mode, captured size and "
        "property; no other tests are collected unless paths are given; may be given again",
    )
    group.addoption(
        "--graphkit-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where --graphkit captures",
    )


def pytest_configure(config: pytest.Config) -> None:
    """With a target and no path, the target is what is to be tested."""
    if config.option.graphkit and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add the tests of every target."""
    for text in session.config.option.graphkit:
        from graphkit.testing.collection import TargetCollector

        collector = TargetCollector.from_parent(session, name=text, nodeid=text)
        items.extend(session.genitems(collector))


@pytest.fixture
def replay_equivalence() -> Callable[..., None]:
    """Fails the test unless replays are what the forward makes without graphs and padding.

    ``replay_equivalence(runner, batches)`` is ``graphkit.testing.assert_replay_equivalent``;
    ``replay_equivalence(target)`` is ``assert_target_equivalent``, which captures every mode.
    """
    from graphkit.runners import Runner
    from graphkit.testing.equivalence import assert_replay_equivalent, assert_target_equivalent

    def check(subject: Runner[Any, Any] | CaptureTarget, *batches: Any, **options: Any) -> None:
        if isinstance(subject, Runner):
            assert_replay_equivalent(subject, *batches, **options)
        else:
            assert_target_equivalent(subject, *batches, **options)

    return check
