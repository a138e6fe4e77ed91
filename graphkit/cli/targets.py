"""The TARGET that a command captures or audits: imported, a folder, or the reference model."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphkit.cli.exits import UsageError
from graphkit.cli.models import import_models, kv_dtype, load_model, use_one_thread
from graphkit.cli.options import SPECULATION, refuse_options, speculation_settings
from graphkit.cli.output import print_message, progress_on_stderr
from graphkit.errors import ConfigError
from graphkit.records import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphkit.distributed import RankGroup
    from graphkit.records import CaptureRecord
    from graphkit.runners.targets import CaptureTarget
    from graphkit.spec import ForwardMode

_REFERENCE = "graphkit.models:reference_target"
FOLDER_OPTIONS = (
    "draft", "dtype", "trust_remote_code", "kv_dtype", "algorithm", *SPECULATION,
    "max_context_len",
)  # fmt: skip
"""Options that apply to a --checkpoint alone."""
_LARGEST_BATCH = 8
"""Requests that a target of a folder has room for by default."""


@dataclass(frozen=True, slots=True)
class TargetSelection:
    """A TARGET with the modes, sizes and device that a command selects.

    No modes are all that it has, no sizes the default of the command.
    """

    target: CaptureTarget
    modes: list[ForwardMode] | None
    batch_sizes: list[int] | None
    device: str

    @property
    def settings(self) -> dict[str, Any]:
        """Modes, sizes and device, as functions that capture a target take them."""
        return {"modes": self.modes, "batch_sizes": self.batch_sizes, "device": self.device}


def select_target(arguments: argparse.Namespace, group: RankGroup | None = None) -> TargetSelection:
    """Import a TARGET, or load a folder, and resolve the options of ``add_target_options``.

    Raises:
        UsageError: Options contradict each other.
        CheckpointError: The folder cannot be loaded.
        ConfigError: A mode is unknown, or a setting is out of range.
        DeviceError: The device is missing.
        TargetError: The TARGET cannot be imported or is not a CaptureTarget.
    """
    from graphkit.audit.locate_target import locate
    from graphkit.graphs import resolve_device

    modes = _parse_modes(arguments.mode)
    device = resolve_device(arguments.device)
    if arguments.checkpoint is not None:
        if arguments.target is not None:
            raise UsageError(
                f"--checkpoint is given with the TARGET {arguments.target!r}. Give one of the two."
            )
        target = load_model(arguments, group, arguments.quantize).target(
            max_batch_size=max(arguments.batch_sizes or [_LARGEST_BATCH]),
            max_context_len=arguments.max_context_len,
            kv_dtype=kv_dtype(arguments),
            **speculation_settings(arguments),
        )
    else:
        why = "applies to a --checkpoint: a TARGET has its own settings."
        refuse_options(arguments, FOLDER_OPTIONS, why)
        name = _REFERENCE if arguments.target is None else arguments.target
        if name == _REFERENCE:
            if device.type == "cpu":
                use_one_thread()
            target = import_models().reference_target(
                str(device), quantize=arguments.quantize, group=group,
                row_invariant=arguments.row_invariant,
            )  # fmt: skip
        else:
            refuse_options(arguments, ("quantize", "row_invariant"), why)
            target = locate(name, str(device), group)
    return TargetSelection(target, modes, arguments.batch_sizes, str(device))


def announce(verb: str, selection: TargetSelection, batch_sizes: Sequence[int] | None) -> None:
    """Print what the command is about to do; ``None`` stands for the sizes of the target.

    Raises:
        ConfigError: The target cannot have these sizes.
    """
    from graphkit.graphs import SizeTable

    target, device = selection.target, selection.device
    if batch_sizes is None:
        batch_sizes = target.batch_sizes
    sizes = SizeTable(target.sizes.max_batch_size, batch_sizes).sizes
    modes = [mode.name for mode in dict.fromkeys(selection.modes or target.modes)]
    text = f"{verb} {', '.join(modes)} of {target.name} on {device}: {count_of(len(sizes), 'size')}"
    if len(modes) > 1:
        text += " per mode"
    text += f", up to {count_of(sizes[-1], 'request')}"
    if device.startswith("cuda"):
        text += "; kernels of a mode that Triton's cache lacks are compiled before its first size"
    print_message(text)


def capture_selected(selection: TargetSelection, *, inspect: bool) -> CaptureRecord:
    """Capture a selection, with progress on stderr; ``inspect`` for the nodes of each graph, too.

    Raises:
        CaptureError: A forward cannot be captured.
        TargetError: The TARGET lacks a mode.
    """
    from graphkit.audit.runs.capture import capture_target

    few = sizes_of_a_first_look(selection.target) if selection.batch_sizes is None else None
    if few is not None:
        selection = replace(selection, batch_sizes=few)
    announce("capturing", selection, selection.batch_sizes)
    with progress_on_stderr() as progress:
        return capture_target(
            selection.target,
            inspect=inspect,
            compares_all=few is None,
            progress=progress,
            **selection.settings,
        )


def sizes_of_a_first_look(target: CaptureTarget) -> list[int] | None:
    """Return the sizes to capture if neither the command nor the target names any.

    The default list of a server has 27 sizes up to 64 requests. For a look at the graphs and a
    check of the replays, powers of two are enough, and take a quarter of the time. Each batch size
    is then compared at the size that it replays at, and one request at every size.

    Returns:
        Powers of two and the largest size; ``None``, which is the list of the target, if it names
        sizes or has at most 8.
    """
    largest = target.sizes.max_batch_size
    if target.batch_sizes is not None or largest <= _LARGEST_BATCH:
        return None
    return [*(1 << bits for bits in range((largest - 1).bit_length())), largest]


def _parse_modes(names: list[str] | None) -> list[ForwardMode] | None:
    from graphkit.runners import RUNNERS

    if names is None:
        return None
    known = {mode.name: mode for mode in RUNNERS}
    for name in names:
        if name.upper() not in known:
            raise ConfigError(f"unknown mode {name!r}: modes are {', '.join(known)}.", field="mode")
    return [known[name.upper()] for name in names]
