"""The models of generate and bench: a folder, a shape with random weights, or the reference."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from graphkit.cli.exits import UsageError
from graphkit.cli.options import speculation_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    import torch

    from graphkit.distributed import RankGroup
    from graphkit.engine import SpeculativeEngine
    from graphkit.models import TransformersModel
    from graphkit.models.reference import EngineModels, Tokenizer
    from graphkit.spec import SpecConfig


_SMALL_WEIGHTS = 64 << 20
"""Most bytes of weights of a model that runs on one thread of a CPU."""


@dataclass(frozen=True, slots=True)
class OpenModels:
    """Models of generate and bench, and the settings of their speculation.

    Attributes:
        models: The models.
        folder: The folder of the target; ``None`` for a model whose tokens are bytes.
        algorithm: Name of the algorithm.
        spec: Settings of drafts.
        longest_context: Most tokens of a request; ``None`` without a limit.
        engine: Creates an engine over the models, with the arguments of ``SpeculativeEngine``,
            ``max_batch_size`` and ``max_context_len``.
        load_tokenizer: Loads the tokenizer of the target. Raises ``CheckpointError`` for a folder
            without one.
    """

    models: TransformersModel | EngineModels
    folder: Path | None
    algorithm: str
    spec: SpecConfig
    longest_context: int | None
    engine: Callable[..., SpeculativeEngine]
    load_tokenizer: Callable[[], Tokenizer]


def open_models(
    arguments: argparse.Namespace, group: RankGroup | None = None, quantize: str | None = None
) -> OpenModels:
    """Load the models of --checkpoint, --shape or the reference model.

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

    device = resolve_device(arguments.device)
    if arguments.checkpoint is not None:
        return _open_folder(arguments, device, group, quantize)
    names = ("draft", "dtype", "trust_remote_code")
    refuse_options(arguments, names, "applies to a --checkpoint. Give one.")
    if device.type == "cpu":
        use_one_thread()
    from graphkit.models.reference import engine_of, spec_of
    from graphkit.models.reference.tokenizer import END_OF_TEXT

    models = _reference_models(arguments, device, group, quantize)
    spec = spec_of(models.algorithm, **speculation_settings(arguments))
    config = models.target.config
    return OpenModels(
        models=models,
        folder=None,
        algorithm=models.algorithm,
        spec=spec,
        longest_context=config.max_position_embeddings,
        engine=partial(
            engine_of, models, spec, bos_token_id=END_OF_TEXT, kv_dtype=kv_dtype(arguments)
        ),
        load_tokenizer=partial(_load_tokenizer, arguments, config.vocab_size),
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
        group=group,
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
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def use_one_thread() -> None:
    """Compute with one thread, for small models such as those that ship with graphkit.

    Their operations are so short that waiting for a second thread costs more than it saves, many
    times more on a busy machine.
    """
    import torch

    torch.set_num_threads(1)


def _open_folder(
    arguments: argparse.Namespace,
    device: torch.device,
    group: RankGroup | None,
    quantize: str | None,
) -> OpenModels:
    model = load_folder(arguments, device, group, quantize)
    settings = speculation_settings(arguments)
    return OpenModels(
        models=model,
        folder=arguments.checkpoint,
        algorithm=model.algorithm,
        spec=model.spec(**settings),
        longest_context=model.longest_context,
        engine=partial(model.engine, kv_dtype=kv_dtype(arguments), **settings),
        load_tokenizer=partial(
            _load_tokenizer, arguments, model.model.config.get_text_config(decoder=True).vocab_size
        ),
    )


def _load_tokenizer(arguments: argparse.Namespace, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of the target.

    A folder of 256 tokens without a tokenizer has bytes as tokens, as the reference model.

    Raises:
        CheckpointError: The folder has no tokenizer, or it cannot be loaded.
    """
    from graphkit.models.reference import ByteTokenizer
    from graphkit.models.reference.tokenizer import VOCAB_SIZE

    folder = arguments.checkpoint
    if folder is None or (vocab_size == VOCAB_SIZE and not (folder / "tokenizer.json").exists()):
        return ByteTokenizer()
    tokenizer: Tokenizer = _hf().FolderTokenizer(
        folder, vocab_size, trust_remote_code=bool(arguments.trust_remote_code)
    )
    return tokenizer


def _reference_models(
    arguments: argparse.Namespace,
    device: torch.device,
    group: RankGroup | None,
    quantize: str | None,
) -> EngineModels:
    from graphkit.models.heads.folders import head_algorithm
    from graphkit.models.reference import checkpoint_dtype, load_models, random_models
    from graphkit.models.reference.engine_models import check_algorithm

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


def kv_dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    """Return the data type of keys and values; ``None`` for the data type of the weights."""
    import torch

    return None if arguments.kv_dtype is None else torch.float8_e4m3fn


def _hf() -> ModuleType:
    """Import ``graphkit.models``.

    Raises:
        UsageError: The package transformers is missing.
    """
    try:
        return import_module("graphkit.models")
    except ImportError as error:
        raise UsageError(f"--checkpoint cannot be loaded: {error}") from error
