"""The models of generate and bench: a folder, a shape with random weights, or the reference."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphkit.cli.exits import UsageError
from graphkit.cli.options import refuse_options, speculation_settings

if TYPE_CHECKING:
    from collections.abc import Callable
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
        tokenizer: The tokenizer of the target. Bytes are the tokens of a model without a folder.
        spec: Settings of drafts.
        engine: Creates an engine over the models, with the arguments of ``SpeculativeEngine``,
            ``max_batch_size`` and ``max_context_len``.
    """

    model: TransformersModel
    tokenizer: Tokenizer
    spec: SpecConfig
    engine: Callable[..., SpeculativeEngine]


def open_models(
    arguments: argparse.Namespace,
    group: RankGroup | None = None,
    quantize: str | None = None,
    *,
    adapts: bool = False,
) -> OpenModels:
    """Load the models of --checkpoint, --shape or the reference model.

    If ``adapts``, each step chooses its draft length unless --num-steps are given.

    Raises:
        UsageError: Options contradict each other, or the package transformers is missing.
        CheckpointError: A folder or its tokenizer cannot be loaded.
        ConfigError: A setting is out of range, or the models do not fit the algorithm.
    """
    from graphkit.models.tokenizer import END_OF_TEXT, ByteTokenizer

    options: dict[str, Any] = {"kv_dtype": kv_dtype(arguments)}
    if arguments.checkpoint is None:
        names = ("draft", "dtype", "trust_remote_code")
        refuse_options(arguments, names, "applies to a --checkpoint. Give one.")
        options["bos_token_id"] = END_OF_TEXT
    model = load_model(arguments, group, quantize)
    settings = speculation_settings(arguments)
    chooses = adapts and "num_steps" not in settings
    spec = model.engine_spec(**settings) if chooses else model.spec(**settings)
    settings["num_steps"] = spec.num_steps
    return OpenModels(
        model=model,
        tokenizer=ByteTokenizer() if arguments.checkpoint is None else model.tokenizer,
        spec=spec,
        engine=partial(model.engine, **options, **settings),
    )


def load_model(
    arguments: argparse.Namespace, group: RankGroup | None, quantize: str | None
) -> TransformersModel:
    """Load the folders of --checkpoint and --draft, a --shape or the reference model.

    Raises:
        UsageError: The package transformers is missing.
        CheckpointError: A folder cannot be loaded.
        ConfigError: The model cannot be served, or the draft model does not fit it.
    """
    import torch

    from graphkit.graphs import resolve_device

    models, device = import_models(), resolve_device(arguments.device)
    folder, shape = arguments.checkpoint, getattr(arguments, "shape", None)
    options: dict[str, Any] = {
        "device": device, "quantize": quantize, "group": group,
        "row_invariant": arguments.row_invariant,
    }  # fmt: skip
    if shape is None and arguments.dtype is not None:
        options["dtype"] = getattr(torch, arguments.dtype)
    elif shape is None and (folder is None or device.type == "cpu"):
        options["dtype"] = torch.float32
    model: TransformersModel
    if folder is not None:
        if not arguments.verbose:
            from transformers.utils import logging

            logging.set_verbosity_error()  # type: ignore[no-untyped-call]
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model = models.load(
            folder,
            draft=arguments.draft,
            algorithm=arguments.algorithm,
            trust_remote_code=bool(arguments.trust_remote_code),
            **options,
        )
    elif shape is not None:
        model = models.random_model(shape, arguments.algorithm or "EAGLE", **options)
    else:
        model = models.reference_model(arguments.algorithm or "EAGLE", **options)
    weights = sum(parameter.nbytes for parameter in model.model.parameters())
    if device.type == "cpu" and weights <= _SMALL_WEIGHTS:
        use_one_thread()
    return model


def use_one_thread() -> None:
    """Compute with one thread, for small models such as those that ship with graphkit.

    Their operations are so short that waiting for a second thread costs more than it saves, many
    times more on a busy machine.
    """
    import torch

    torch.set_num_threads(1)


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
