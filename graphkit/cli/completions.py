"""Runs prompts through an engine with the reference models, whose tokens are bytes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from graphkit.cli.exit_codes import UsageError
from graphkit.cli.generated_text import OnText, TextDisplay
from graphkit.cli.output import progress_on_stderr
from graphkit.cli.threads import use_one_thread
from graphkit.engine import Request, SamplingParams, SpeculativeEngine
from graphkit.graphs import environment, resolve_device
from graphkit.records import Completion, GenerateRecord
from graphkit.reference import LlamaConfig, decode, default_checkpoint, reference_engine
from graphkit.reference.checkpoint_folder import read_config
from graphkit.reference.tokenizer import END_OF_TEXT, VOCAB_SIZE

_LARGEST_BATCH = 32
"""Further prompts wait in the queue."""


def complete(
    arguments: argparse.Namespace, prompts: Sequence[bytes], display: TextDisplay
) -> GenerateRecord:
    """Continue prompts with the options of ``graphkit generate``.

    Args:
        arguments: The parsed options.
        prompts: At least one.
        display: Shows the text as it is generated.

    Raises:
        UsageError: A prompt is too long, or the checkpoint's tokens are not bytes.
        GraphkitError: The engine refuses its settings, or a forward cannot be captured.
    """
    sampling = SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        stop_token_ids=frozenset({END_OF_TEXT}),
    )
    with _engine(arguments, len(prompts)) as engine:
        for prompt in prompts:
            _check_length(prompt, engine.context_limit)
        requests = [engine.submit(prompt, sampling) for prompt in prompts]
        capture_seconds = None if arguments.eager else _capture(engine)
        max_new_tokens = sum(request.max_tokens - len(request.prompt_ids) for request in requests)
        with display(prompts, max_new_tokens) as on_text:
            seconds = _run_to_end(engine, on_text)
        completions = tuple(map(_completion, prompts, requests))
        return _record(arguments, engine, completions, seconds, capture_seconds)


def _engine(arguments: argparse.Namespace, num_prompts: int) -> SpeculativeEngine:
    """Return an engine with room for the longest context of its model."""
    device = resolve_device(arguments.device)
    folder = arguments.checkpoint or default_checkpoint()
    try:
        config = LlamaConfig.from_dict(read_config(folder))
    except OSError as error:  # such as a name that is too long
        raise UsageError(f"cannot read checkpoint {folder}: {error.strerror}.") from error
    if config.vocab_size != VOCAB_SIZE:
        raise UsageError(
            f"{folder} has a vocabulary of {config.vocab_size} tokens, but generate needs the "
            f"{VOCAB_SIZE} bytes as tokens. Choose a different --checkpoint."
        )
    if device.type == "cpu" and arguments.checkpoint is None:
        use_one_thread()
    return reference_engine(
        arguments.algorithm,
        topk=arguments.topk,
        num_steps=arguments.num_steps,
        num_draft_tokens=arguments.num_draft_tokens,
        max_batch_size=min(num_prompts, _LARGEST_BATCH),
        max_context_len=config.max_position_embeddings,
        device=device,
        generation=arguments.generation,
        steps_per_launch=arguments.steps_per_launch,
        checkpoint=arguments.checkpoint,
        seed=arguments.seed,
    )


def _check_length(prompt: bytes, limit: int) -> None:
    if len(prompt) < limit:
        return
    raise UsageError(
        f"a prompt has {len(prompt)} bytes, but prompt and output together are limited to {limit}. "
        "Shorten the prompt."
    )


def _capture(engine: SpeculativeEngine) -> float:
    """Capture all graphs and return the seconds taken."""
    started = time.perf_counter()
    modes = iter(range(len(engine.runners)))
    with progress_on_stderr() as progress:
        engine.capture(lambda what: progress(next(modes), len(engine.runners), what))
    return time.perf_counter() - started


def _run_to_end(engine: SpeculativeEngine, on_text: OnText) -> float:
    """Generate all tokens and return the seconds taken."""
    started = time.perf_counter()
    while engine.has_work:
        for _, tokens in engine.step():
            on_text(_text_of(tokens))
    return time.perf_counter() - started


def _text_of(tokens: Sequence[int]) -> bytes:
    """Return the tokens as bytes, without the token that ends a text."""
    return bytes(tokens).removesuffix(bytes([END_OF_TEXT]))


def _completion(prompt: bytes, request: Request) -> Completion:
    return Completion(
        prompt=decode(prompt),
        text=decode(_text_of(request.output_ids)),
        finish_reason=request.finish_reason.value if request.finish_reason else "",
        tokens=len(request.output_ids),
        accept_length=request.accept_length,
    )


def _record(
    arguments: argparse.Namespace,
    engine: SpeculativeEngine,
    completions: tuple[Completion, ...],
    seconds: float,
    capture_seconds: float | None,
) -> GenerateRecord:
    stats, spec = engine.stats, engine.spec
    return GenerateRecord(
        text=completions[0].text,
        completions=completions,
        environment=environment(engine.device),
        backend=engine.runners[0].backend.name,
        algorithm=arguments.algorithm.upper(),
        topk=spec.topk,
        num_steps=spec.num_steps,
        num_draft_tokens=spec.num_draft_tokens,
        generation=engine.generation,
        temperature=arguments.temperature,
        seed=arguments.seed,
        new_tokens=stats.new_tokens,
        seconds=seconds,
        tokens_per_second=stats.new_tokens / seconds,
        accept_length=stats.accept_length,
        capture_seconds=capture_seconds,
        replays=stats.replays,
        fallbacks=stats.fallbacks,
        accepted_lengths=stats.accepted_lengths,
    )
