"""Runs prompts through an engine with the models of the command."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from graphkit.cli.exits import UsageError
from graphkit.cli.generate_texts import OnText, TextDisplay, prompt_end
from graphkit.cli.models import OpenModels, open_models
from graphkit.cli.output import progress_on_stderr
from graphkit.distributed import RankGroup
from graphkit.engine import (
    FinishReason,
    Request,
    SamplingParams,
    SpeculativeEngine,
    TextStream,
)
from graphkit.errors import InputError
from graphkit.graphs import environment
from graphkit.records import Completion, GenerateRecord

_PROCESSORS = "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"
_LARGEST_BATCH = 32
"""Further prompts wait in the queue."""
_LARGEST_DEFAULT_CONTEXT = 4096
"""The KV pools hold every running request at its longest, so more is allocated on request only."""


def complete(
    arguments: argparse.Namespace,
    prompts: Sequence[str],
    display: TextDisplay,
    group: RankGroup | None = None,
) -> GenerateRecord:
    """Continue prompts with the options of ``graphkit generate``.

    Args:
        arguments: The parsed options.
        prompts: At least one; bytes that are not UTF-8 are lone surrogates.
        display: Shows the text as it is generated.
        group: Ranks that split the target; the others call ``follow``.

    Raises:
        UsageError: A prompt or the context is too long, or a prompt cannot be used.
        GraphkitError: A folder cannot be loaded, the engine refuses its settings, or a forward
            cannot be captured.
    """
    models = open_models(arguments, group, arguments.quantize)
    tokenizer = models.load_tokenizer()
    encode = tokenizer.encode_chat if arguments.chat else tokenizer.encode
    with _refusing_prompts():
        prompt_ids = [encode(prompt) for prompt in prompts]
    processors = {name: getattr(arguments, name) for name in _PROCESSORS}
    sampling = tokenizer.sampling_params(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        **{name: value for name, value in processors.items() if value is not None},
    )
    streams = [TextStream(tokenizer, ids, arguments.stop) for ids in prompt_ids]
    with _engine(arguments, models, len(prompts)) as engine:
        for ids in prompt_ids:
            _check_length(ids, engine.context_limit)
        with _refusing_prompts():
            requests = [engine.submit(ids, sampling) for ids in prompt_ids]
        capture_seconds = None if arguments.eager else _capture(engine)
        max_new_tokens = sum(request.max_tokens - len(request.prompt_ids) for request in requests)
        by_request = dict(zip(requests, streams, strict=True))
        shown = [_printable(prompt) for prompt in prompts]
        heads = [prompt + prompt_end(arguments.chat) for prompt in shown]
        with display(heads, max_new_tokens) as on_text:
            seconds = _run_to_end(engine, by_request, tokenizer.stop_ids, on_text)
        completions = tuple(map(_completion, shown, requests, streams))
        return _record(
            arguments,
            sampling,
            models.model.algorithm,
            engine,
            completions,
            seconds,
            capture_seconds,
        )


def follow(arguments: argparse.Namespace, group: RankGroup, num_prompts: int) -> None:
    """Run the engine of ``complete`` on another rank than 0."""
    with _engine(
        arguments, open_models(arguments, group, arguments.quantize), num_prompts
    ) as engine:
        if not arguments.eager:
            engine.capture()
        engine.worker_loop()


def _engine(
    arguments: argparse.Namespace, models: OpenModels, num_prompts: int
) -> SpeculativeEngine:
    """Return an engine for so many prompts."""
    return models.engine(
        max_batch_size=min(num_prompts, _LARGEST_BATCH),
        max_context_len=_context_length(arguments.max_context_len, models.model.longest_context),
        generation=arguments.generation,
        steps_per_launch=arguments.steps_per_launch,
        seed=arguments.seed,
    )


def _context_length(chosen: int | None, longest: int | None) -> int:
    """Return the most tokens of a request, drafts included; ``longest`` is that of the target."""
    if chosen is None:
        return min(longest or _LARGEST_DEFAULT_CONTEXT, _LARGEST_DEFAULT_CONTEXT)
    if longest is not None and chosen > longest:
        raise UsageError(
            f"--max-context-len is {chosen}, but the target has contexts of 1 to {longest} tokens. "
            "Choose one of these."
        )
    return chosen


@contextmanager
def _refusing_prompts() -> Iterator[None]:
    """Make the errors of prompts in the block those of an argument that cannot be used."""
    try:
        yield
    except InputError as error:
        raise UsageError(str(error)) from error


def _check_length(prompt_ids: Sequence[int], limit: int) -> None:
    if len(prompt_ids) < limit:
        return
    raise UsageError(
        f"a prompt has {len(prompt_ids)} tokens, but prompt and output together are limited to "
        f"{limit}. Shorten the prompt, or increase --max-context-len if the target allows it."
    )


def _capture(engine: SpeculativeEngine) -> float:
    """Capture all graphs and return the seconds taken."""
    started = time.perf_counter()
    modes = iter(range(len(engine.runners)))
    with progress_on_stderr() as progress:
        engine.capture(lambda what: progress(next(modes), len(engine.runners), what))
    return time.perf_counter() - started


def _run_to_end(
    engine: SpeculativeEngine,
    streams: Mapping[Request, TextStream],
    stop_ids: frozenset[int],
    on_text: OnText,
) -> float:
    """Generate all tokens and return the seconds taken."""
    started = time.perf_counter()
    while engine.has_work:
        for request, tokens in engine.step():
            stream = streams[request]
            piece = stream.append([token for token in tokens if token not in stop_ids])
            on_text(piece, len(tokens))
            if stream.is_stopped:
                engine.abort(request, FinishReason.STOP_STRING)
    for stream in streams.values():
        on_text(stream.finish(), 0)
    return time.perf_counter() - started


def _printable(text: str) -> str:
    """Replace the surrogates of bytes that are not UTF-8 by U+FFFD."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _completion(prompt: str, request: Request, stream: TextStream) -> Completion:
    reason = request.finish_reason.value if request.finish_reason else ""
    return Completion(
        prompt=prompt,
        text=stream.text,
        finish_reason=reason,
        tokens=len(request.output_ids),
        accept_length=request.accept_length,
        token_ids=tuple(request.output_ids),
    )


def _record(
    arguments: argparse.Namespace,
    sampling: SamplingParams,
    algorithm: str,
    engine: SpeculativeEngine,
    completions: tuple[Completion, ...],
    seconds: float,
    capture_seconds: float | None,
) -> GenerateRecord:
    stats, spec = engine.stats, engine.spec.longest
    return GenerateRecord(
        text=completions[0].text,
        completions=completions,
        environment=environment(engine.device),
        backend=engine.runners[0].backend.name,
        algorithm=algorithm,
        topk=spec.topk,
        num_steps=spec.num_steps,
        num_draft_tokens=spec.num_draft_tokens,
        generation=engine.generation,
        temperature=arguments.temperature,
        seed=arguments.seed,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        is_chat=arguments.chat,
        **{name: getattr(sampling, name) for name in _PROCESSORS},
        new_tokens=stats.new_tokens,
        seconds=seconds,
        tokens_per_second=stats.new_tokens / seconds,
        accept_length=stats.accept_length,
        capture_seconds=capture_seconds,
        replays=stats.replays,
        fallbacks=stats.fallbacks,
        accepted_lengths=stats.accepted_lengths,
        drafted_lengths=stats.drafted_lengths,
    )
