"""A TARGET in the words of a command, and its capture."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphkit.cli.screen import progress_on_stderr
from graphkit.cli.threads import use_one_thread
from graphkit.errors import ConfigError

if TYPE_CHECKING:
    from graphkit.records import CaptureRecord
    from graphkit.spec import ForwardMode
    from graphkit.targets import CaptureTarget

REFERENCE = "graphkit.reference:reference_target"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a command works on.

    Attributes:
        target: The TARGET.
        modes: Modes to capture; ``None`` for all that it has.
        batch_sizes: Sizes to capture; ``None`` for the command's default.
        device: ``cpu`` or ``cuda``.
    """

    target: CaptureTarget
    modes: list[ForwardMode] | None
    batch_sizes: list[int] | None
    device: str


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Declare the words that say what of a TARGET is captured, and where."""
    parser.add_argument(
        "--mode", action="append", metavar="M",
        help="DECODE, TARGET_VERIFY, DRAFT, DRAFT_EXTEND, DRAFT_EXTEND_V2 or MULTI_LAYER_EAGLE, "
        "in small letters too; may be given again; default: all that TARGET has",
    )  # fmt: skip
    parser.add_argument(
        "--batch-sizes", type=_sizes, metavar="1,2,4",
        help="sizes to capture; the largest batch that TARGET allows is always among them",
    )  # fmt: skip
    add_device_option(parser)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Declare the word that says where to run."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="default: auto, which is cuda where there is one",
    )  # fmt: skip


def subject_of(target: str, arguments: argparse.Namespace) -> Subject:
    """What the words name.

    Args:
        target: ``package.module:attribute``.
        arguments: The words that ``add_target_options`` declares.

    Raises:
        GraphkitError: The target's or the device's own; ``ConfigError`` for an unknown mode.
    """
    from graphkit.graphs import resolve_device
    from graphkit.targets import locate

    modes = _modes(arguments.mode)
    device = str(resolve_device(arguments.device))
    if device == "cpu" and target == REFERENCE:
        use_one_thread()
    return Subject(locate(target, device), modes, arguments.batch_sizes, device)


def captured(target: str, arguments: argparse.Namespace, *, inspect: bool) -> CaptureRecord:
    """Capture a TARGET as the words say, with progress on stderr.

    Args:
        target: ``package.module:attribute``.
        arguments: The words that ``add_target_options`` declares.
        inspect: Whether to look into the graphs, too.

    Raises:
        GraphkitError: As for ``subject_of``, and the capture's own.
    """
    from graphkit.targets import capture_target

    subject = subject_of(target, arguments)
    with progress_on_stderr() as progress:
        return capture_target(
            subject.target,
            modes=subject.modes,
            batch_sizes=subject.batch_sizes,
            device=subject.device,
            inspect=inspect,
            progress=progress,
        )


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 1,2,4") from None


def _modes(names: list[str] | None) -> list[ForwardMode] | None:
    from graphkit.spec import ForwardMode

    if names is None:
        return None
    known = ", ".join(ForwardMode.__members__)
    for name in names:
        if name.upper() not in ForwardMode.__members__:
            raise ConfigError(f"unknown mode {name!r}; modes are {known}.", field="mode")
    return [ForwardMode[name.upper()] for name in names]
