"""What a command runs, as its options select it: a TARGET, a folder, a shape, or the package's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import UsageError
from graphkit.cli.options import SPECULATION, speculation_settings
from graphkit.cli.output import print_message, progress_on_stderr
from graphkit.errors import ConfigError
from graphkit.records import count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    import torch

    from graphkit.distributed import RankGroup
    from graphkit.engine import SpeculativeEngine
    from graphkit.hf import TransformersModel
    from graphkit.records import CaptureRecord, MemoryEstimate
    from graphkit.reference import EngineModels, Tokenizer
    from graphkit.spec import ForwardMode, SpecConfig
    from graphkit.targets import CaptureTarget


_REFERENCE = "graphkit.reference:reference_target"
_FOLDER_OPTIONS = (
    "draft", "dtype", "trust_remote_code", "kv_dtype", "algorithm", *SPECULATION,
    "max_context_len",
)  # fmt: skip
_SMALL_WEIGHTS = 64 << 20
"""Most bytes of weights of a model that runs on one thread of a CPU."""
_LARGEST_BATCH = 8
"""Requests that a target of a folder has room for by default."""


@dataclass(frozen=True, slots=True)
class TargetSelection:
    """A TARGET with the modes, sizes and device that a command selects.

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


def select_target(arguments: argparse.Namespace, group: RankGroup | None = None) -> TargetSelection:
    """Import a TARGET, or load a folder, and resolve the options of ``add_target_options``.

    Args:
        arguments: The parsed options.
        group: Ranks that run the TARGET.

    Raises:
        UsageError: Options contradict each other.
        CheckpointError: The folder cannot be loaded.
        ConfigError: A mode is unknown, or a setting is out of range.
        DeviceError: The device is missing.
        TargetError: The TARGET cannot be imported or is not a CaptureTarget.
    """
    from graphkit.graphs import resolve_device
    from graphkit.targets import locate

    modes = _parse_modes(arguments.mode)
    device = resolve_device(arguments.device)
    if arguments.checkpoint is not None:
        target = _folder_target(arguments, device, group)
    else:
        why = "applies to a --checkpoint: a TARGET has its own settings."
        _refuse_options(arguments, _FOLDER_OPTIONS, why)
        name = arguments.target or _REFERENCE
        if name != _REFERENCE:
            _refuse_options(arguments, ("quantize",), why)
        if device.type == "cpu" and name == _REFERENCE:
            _use_one_thread()
        if arguments.quantize is None:
            target = locate(name, str(device), group)
        else:
            target = _reference_target(arguments, device, group)
    return TargetSelection(target, modes, arguments.batch_sizes, str(device))


def announce(verb: str, selection: TargetSelection, batch_sizes: Sequence[int] | None) -> None:
    """Print to stderr what the command is about to do.

    Args:
        verb: Such as ``capturing``.
        selection: The modes and the device.
        batch_sizes: The sizes; ``None`` for those that the target names.

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
        text += "; the first size of a mode compiles kernels and takes longest"
    print_message(text)


def capture_selected(selection: TargetSelection, *, inspect: bool) -> CaptureRecord:
    """Capture a selection, with progress on stderr.

    Args:
        selection: What to capture.
        inspect: If True, the record also holds the nodes of each graph.

    Raises:
        CaptureError: A forward cannot be captured.
        TargetError: The TARGET lacks a mode.
    """
    from graphkit.verify import capture_target

    announce("capturing", selection, selection.batch_sizes)
    with progress_on_stderr() as progress:
        return capture_target(
            selection.target,
            modes=selection.modes,
            batch_sizes=selection.batch_sizes,
            device=selection.device,
            inspect=inspect,
            progress=progress,
        )


def estimate_selected(selection: TargetSelection) -> MemoryEstimate:
    """Predict the memory of a selection from captures of a few sizes, which are closed.

    Raises:
        CaptureError: A forward cannot be captured.
        TargetError: The TARGET lacks a mode.
    """
    from graphkit.verify import estimate_target

    announce("estimating", selection, selection.batch_sizes)
    return estimate_target(
        selection.target,
        modes=selection.modes,
        batch_sizes=selection.batch_sizes,
        device=selection.device,
    )


@dataclass(frozen=True, slots=True)
class OpenModels:
    """Models of generate and bench, and the settings of their speculation.

    Attributes:
        models: The models.
        folder: The folder of the target; ``None`` for a model whose tokens are bytes.
        trust_remote_code: Whether Python code in the folder runs.
        algorithm: Name of the algorithm.
        spec: Settings of drafts.
        vocab_size: Size of the vocabulary.
        longest_context: Most tokens of a request; ``None`` without a limit.
        engine: Creates an engine over the models, with the arguments of ``SpeculativeEngine``,
            ``max_batch_size`` and ``max_context_len``.
    """

    models: TransformersModel | EngineModels
    folder: Path | None
    trust_remote_code: bool
    algorithm: str
    spec: SpecConfig
    vocab_size: int
    longest_context: int | None
    engine: Callable[..., SpeculativeEngine]


def open_models(
    arguments: argparse.Namespace, group: RankGroup | None = None, quantize: str | None = None
) -> OpenModels:
    """Load the models of --checkpoint, --shape or the reference model.

    Ranks split a folder that has the layout of Llama, which ``graphkit.reference`` reads.

    Args:
        arguments: The parsed options.
        group: Ranks that split the target.
        quantize: Format of the weights of linear layers; ``None`` for the weights as they are.

    Raises:
        UsageError: Options contradict each other, or the package transformers is missing.
        CheckpointError: A folder cannot be loaded.
        ConfigError: A setting is out of range, or the models do not fit the algorithm.
    """
    from graphkit.graphs import resolve_device

    device, folder = resolve_device(arguments.device), arguments.checkpoint
    if folder is None:
        names = ("draft", "dtype", "trust_remote_code")
        _refuse_options(arguments, names, "applies to a --checkpoint. Give one.")
        if device.type == "cpu":
            _use_one_thread()
    elif group is None:
        return _open_folder(arguments, device, quantize)
    from graphkit.reference import engine_of, spec_of
    from graphkit.reference.tokenizer import END_OF_TEXT

    models = _reference_models(arguments, device, group, quantize)
    spec = spec_of(models.algorithm, **speculation_settings(arguments))
    config, bos = models.target.config, END_OF_TEXT if folder is None else None
    return OpenModels(
        models, folder, bool(arguments.trust_remote_code), models.algorithm, spec,
        config.vocab_size, config.max_position_embeddings,
        partial(engine_of, models, spec, bos_token_id=bos, kv_dtype=_kv_dtype(arguments)),
    )  # fmt: skip


def _load_folder(
    arguments: argparse.Namespace, device: torch.device, quantize: str | None
) -> TransformersModel:
    """Load the folders of --checkpoint and --draft by ``graphkit.hf``.

    Raises:
        UsageError: The package transformers is missing.
        CheckpointError: A folder cannot be loaded.
        ConfigError: The model cannot be served, or the draft model does not fit it.
    """
    hf = _hf()
    from transformers.utils import logging

    if not arguments.verbose:
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: TransformersModel = hf.load(
        arguments.checkpoint,
        draft=arguments.draft,
        algorithm=arguments.algorithm,
        dtype=_dtype(arguments, device),
        quantize=quantize,
        device=device,
        trust_remote_code=bool(arguments.trust_remote_code),
    )
    weights = sum(parameter.nbytes for parameter in model.model.parameters())
    if device.type == "cpu" and weights <= _SMALL_WEIGHTS:
        _use_one_thread()
    return model


def load_tokenizer(models: OpenModels) -> Tokenizer:
    """Return the tokenizer of the target.

    A folder of 256 tokens without a tokenizer has bytes as tokens, as the reference model.

    Raises:
        CheckpointError: The folder has no tokenizer, or it cannot be loaded.
    """
    from graphkit.reference import ByteTokenizer
    from graphkit.reference.tokenizer import VOCAB_SIZE

    folder = models.folder
    if folder is None:
        return ByteTokenizer()
    if models.vocab_size == VOCAB_SIZE and not (folder / "tokenizer.json").exists():
        return ByteTokenizer()
    tokenizer: Tokenizer = _hf().FolderTokenizer(
        folder, models.vocab_size, trust_remote_code=models.trust_remote_code
    )
    return tokenizer


def _folder_target(
    arguments: argparse.Namespace, device: torch.device, group: RankGroup | None
) -> CaptureTarget:
    if arguments.target is not None:
        raise UsageError(
            f"--checkpoint is given with the TARGET {arguments.target!r}. Give one of the two."
        )
    if group is not None:
        why = "does not apply with --tp, where the layout of Llama has its own settings."
        _refuse_options(arguments, _FOLDER_OPTIONS, why)
        return _reference_target(arguments, device, group)
    return _load_folder(arguments, device, arguments.quantize).target(
        max_batch_size=max(arguments.batch_sizes or [_LARGEST_BATCH]),
        max_context_len=arguments.max_context_len,
        kv_dtype=_kv_dtype(arguments),
        **speculation_settings(arguments),
    )


def _reference_target(
    arguments: argparse.Namespace, device: torch.device, group: RankGroup | None
) -> CaptureTarget:
    from graphkit.reference import reference_target

    return reference_target(
        str(device), checkpoint=arguments.checkpoint, quantize=arguments.quantize, group=group
    )


def _parse_modes(names: list[str] | None) -> list[ForwardMode] | None:
    from graphkit.runners import RUNNERS

    if names is None:
        return None
    known = {mode.name: mode for mode in RUNNERS}
    for name in names:
        if name.upper() not in known:
            raise ConfigError(f"unknown mode {name!r}: modes are {', '.join(known)}.", field="mode")
    return [known[name.upper()] for name in names]


def _refuse_options(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse options of a --checkpoint without one.

    Raises:
        UsageError: One of them was given.
    """
    for name in names:
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def _use_one_thread() -> None:
    """Compute with one thread, for small models such as those that ship with graphkit.

    Their operations are so short that waiting for a second thread costs more than it saves, many
    times more on a busy machine.
    """
    import torch

    torch.set_num_threads(1)


def _open_folder(
    arguments: argparse.Namespace, device: torch.device, quantize: str | None
) -> OpenModels:
    model, settings = _load_folder(arguments, device, quantize), speculation_settings(arguments)
    return OpenModels(
        models=model,
        folder=arguments.checkpoint,
        trust_remote_code=model.trust_remote_code,
        algorithm=model.algorithm,
        spec=model.spec(**settings),
        vocab_size=model.model.config.get_text_config(decoder=True).vocab_size,
        longest_context=model.longest_context,
        engine=partial(model.engine, kv_dtype=_kv_dtype(arguments), **settings),
    )


def _reference_models(
    arguments: argparse.Namespace,
    device: torch.device,
    group: RankGroup | None,
    quantize: str | None,
) -> EngineModels:
    from graphkit.reference import checkpoint_dtype, head_algorithm, load_models, random_models
    from graphkit.reference.engine_models import check_algorithm

    folder, draft = arguments.checkpoint, arguments.draft
    if arguments.algorithm is not None:
        algorithm = check_algorithm(arguments.algorithm)
    elif draft is not None:
        algorithm = head_algorithm(draft)
    else:
        algorithm = "EAGLE" if folder is None else "NGRAM"
    if getattr(arguments, "shape", None) is not None:
        return random_models(
            arguments.shape, algorithm, device=device, quantize=quantize, group=group
        )
    return load_models(
        algorithm,
        checkpoint=folder,
        draft=draft,
        device=device,
        dtype=_dtype(arguments, device) or checkpoint_dtype(folder),
        quantize=quantize,
        group=group,
    )


def _dtype(arguments: argparse.Namespace, device: torch.device) -> torch.dtype | None:
    """Return the data type of the weights; ``None`` for that of the folder."""
    import torch

    if arguments.dtype is not None:
        chosen: torch.dtype = getattr(torch, arguments.dtype)
        return chosen
    is_own = device.type == "cuda" and arguments.checkpoint is not None
    return None if is_own else torch.float32


def _kv_dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    """Return the data type of keys and values; ``None`` for the data type of the weights."""
    import torch

    return None if arguments.kv_dtype is None else torch.float8_e4m3fn


def _hf() -> ModuleType:
    """Import ``graphkit.hf``.

    Raises:
        UsageError: The package transformers is missing.
    """
    try:
        return import_module("graphkit.hf")
    except ImportError as error:
        raise UsageError(f"--checkpoint cannot be loaded: {error}") from error
