"""The models of generate and bench: a folder, a shape with random weights, or the reference."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphkit.cli.exits import UsageError
from graphkit.cli.options import speculation_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    import torch

    from graphkit.distributed import RankGroup
    from graphkit.engine import SpeculativeEngine
    from graphkit.models import TransformersModel
    from graphkit.models.tokenizer import Tokenizer
    from graphkit.spec import SpecConfig


_SMALL_WEIGHTS = 64 << 20
"""Most bytes of weights of a model that runs on one thread of a CPU."""


@dataclass(frozen=True, slots=True)
class OpenModels:
    """Models of generate and bench, and the settings of their speculation.

    Attributes:
        model: The target and its draft model.
        folder: The folder of the target; ``None`` for a model whose tokens are bytes.
        spec: Settings of drafts.
        engine: Creates an engine over the models, with the arguments of ``SpeculativeEngine``,
            ``max_batch_size`` and ``max_context_len``.
        load_tokenizer: Loads the tokenizer of the target. Raises ``CheckpointError`` for a folder
            without one.
    """

    model: TransformersModel
    folder: Path | None
    spec: SpecConfig
    engine: Callable[..., SpeculativeEngine]
    load_tokenizer: Callable[[], Tokenizer]


def open_models(
    arguments: argparse.Namespace,
    group: RankGroup | None = None,
    quantize: str | None = None,
    *,
    adapts: bool = False,
) -> OpenModels:
    """Load the models of --checkpoint, --shape or the reference model.

    Args:
        arguments: The parsed options.
        group: Ranks that split the target.
        quantize: Format of the weights of linear layers; ``None`` for the weights as they are.
        adapts: Whether each step chooses its draft length if no --num-steps are given.

    Raises:
        UsageError: Options contradict each other, or the package transformers is missing.
        CheckpointError: A folder cannot be loaded.
        ConfigError: A setting is out of range, or the models do not fit the algorithm.
    """
    from graphkit.graphs import resolve_device
    from graphkit.models.tokenizer import END_OF_TEXT, ByteTokenizer

    device, folder = resolve_device(arguments.device), arguments.checkpoint
    options: dict[str, Any] = {"kv_dtype": kv_dtype(arguments)}
    if folder is not None:
        model = load_folder(arguments, device, group, quantize)
    else:
        names = ("draft", "dtype", "trust_remote_code")
        refuse_options(arguments, names, "applies to a --checkpoint. Give one.")
        if device.type == "cpu":
            use_one_thread()
        model = _shipped_or_random(arguments, device, group, quantize)
        options["bos_token_id"] = END_OF_TEXT
    settings = speculation_settings(arguments)
    chooses = adapts and "num_steps" not in settings
    spec = model.engine_spec(**settings) if chooses else model.spec(**settings)
    settings["num_steps"] = spec.num_steps
    return OpenModels(
        model=model,
        folder=folder,
        spec=spec,
        engine=partial(model.engine, **options, **settings),
        load_tokenizer=lambda: ByteTokenizer() if folder is None else model.tokenizer,
    )


def load_folder(
    arguments: argparse.Namespace,
    device: torch.device,
    group: RankGroup | None,
    quantize: str | None,
) -> TransformersModel:
    """Load the folders of --checkpoint and --draft by ``graphkit.models``; ranks split them.

    Raises:
        UsageError: The package transformers is missing.
        CheckpointError: A folder cannot be loaded.
        ConfigError: The model cannot be served, or the draft model does not fit it.
    """
    models = import_models()
    from transformers.utils import logging

    if not arguments.verbose:
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: TransformersModel = models.load(
        arguments.checkpoint,
        draft=arguments.draft,
        algorithm=arguments.algorithm,
        dtype=_dtype(arguments, device),
        quantize=quantize,
        device=device,
        trust_remote_code=bool(arguments.trust_remote_code),
        group=group,
        row_invariant=arguments.row_invariant,
    )
    weights = sum(parameter.nbytes for parameter in model.model.parameters())
    if device.type == "cpu" and weights <= _SMALL_WEIGHTS:
        use_one_thread()
    return model


def refuse_options(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse options of a --checkpoint without one.

    Raises:
        UsageError: One of them was given.
    """
    for name in names:
        if getattr(arguments, name) not in (None, False):
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def use_one_thread() -> None:
    """Compute with one thread, for small models such as those that ship with graphkit.

    Their operations are so short that waiting for a second thread costs more than it saves, many
    times more on a busy machine.
    """
    import torch

    torch.set_num_threads(1)


def _shipped_or_random(
    arguments: argparse.Namespace,
    device: torch.device,
    group: RankGroup | None,
    quantize: str | None,
) -> TransformersModel:
    """Return the reference model, or a model of --shape with random weights."""
    models, shape = import_models(), getattr(arguments, "shape", None)
    algorithm = arguments.algorithm or "EAGLE"
    options: dict[str, Any] = {"quantize": quantize, "group": group}
    options["row_invariant"] = arguments.row_invariant
    model: TransformersModel
    if shape is not None:
        model = models.random_model(shape, algorithm, device=device, **options)
    else:
        dtype = _dtype(arguments, device)
        model = models.reference_model(algorithm, device=device, dtype=dtype, **options)
    return model


def _dtype(arguments: argparse.Namespace, device: torch.device) -> torch.dtype | None:
    """Return the data type of the weights; ``None`` for that of the folder."""
    import torch

    if arguments.dtype is not None:
        chosen: torch.dtype = getattr(torch, arguments.dtype)
        return chosen
    is_own = device.type == "cuda" and arguments.checkpoint is not None
    return None if is_own else torch.float32


def kv_dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    """Return the data type of keys and values; ``None`` for the data type of the weights."""
    import torch

    return None if arguments.kv_dtype is None else torch.float8_e4m3fn


def import_models() -> ModuleType:
    """Import ``graphkit.models``, and check that transformers is there.

    Raises:
        UsageError: The package transformers is missing.
    """
    try:
        models = import_module("graphkit.models")
        assert models.load, "the function exists"
    except ImportError as error:
        raise UsageError(f"models cannot be loaded: {error}") from error
    return models
