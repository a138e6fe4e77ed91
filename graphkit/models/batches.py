"""``generate_batch`` of transformers over an engine of graphkit, which drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphkit.errors import ConfigError
from graphkit.models.generation import generation_defaults
from graphkit.models.model import TransformersModel

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.generation.continuous_batching.requests import GenerationOutput


def generate_batch(
    model: TransformersModel,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    *,
    max_new_tokens: int | None = None,
    **options: Any,
) -> dict[str, GenerationOutput]:
    """Continue prompts as ``generate_batch`` of transformers does, with the model's drafter.

    Continuous batching of transformers has no speculation. Greedy texts are those of the model;
    samples have its distribution.

    Args:
        model: From ``load``, with ``draft=`` or ``algorithm=``.
        inputs: Token ids of each prompt.
        generation_config: As in transformers; ``None`` takes that of the model.
        max_new_tokens: Most tokens per prompt; ``None`` takes that of the configuration, or 20.
        **options: Of ``TransformersModel.engine``, such as ``num_steps``.

    Returns:
        The results by request, in the order of the prompts.

    Raises:
        ConfigError: The configuration changes text in a way that graphkit does not compute, or asks
            for several sequences per prompt.
        InputError: As for ``SpeculativeEngine.submit``.
    """
    from transformers.generation.continuous_batching.requests import (
        GenerationOutput,
        RequestStatus,
    )

    config = generation_config or model.original.generation_config
    ends = config.eos_token_id
    ends = ends if isinstance(ends, (list, tuple)) else [-1 if ends is None else ends]
    stop_ids = frozenset(token for token in ends if token >= 0)
    defaults = generation_defaults(config, stop_ids, model.head.out_features)
    has_several = (config.num_return_sequences or 1) > 1
    others = [*defaults.others, *(["num_return_sequences"] if has_several else [])]
    if others:
        raise ConfigError(
            f"generate_batch does not compute {', '.join(others)} of generation_config. Leave it "
            "out, or use generate_batch of transformers.",
            field="generation_config",
        )
    longest = max_new_tokens or config.max_new_tokens or 20
    sampling = defaults.sampling_params(max_new_tokens=longest)
    usual = {
        "max_batch_size": min(max(len(inputs), 1), 64),
        "max_context_len": max(map(len, inputs), default=1) + longest + 64,
    }
    with model.engine(**usual | options) as engine:
        engine.capture()
        requests = engine.generate(inputs, sampling)
    return {
        f"req_{index}": GenerationOutput(
            request_id=f"req_{index}",
            prompt_ids=list(prompt),
            generated_tokens=list(request.output_ids),
            status=RequestStatus.FINISHED,
        )
        for index, (prompt, request) in enumerate(zip(inputs, requests, strict=True))
    }
