"""Runs prompts through an engine with the models of the command."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from graphkit.cli.exits import UsageError
from graphkit.cli.generate_texts import OnText, Prompt, TextDisplay, prompt_end
from graphkit.cli.models import OpenModels, open_models
from graphkit.cli.output import progress_on_stderr
from graphkit.distributed import RankGroup
from graphkit.engine import FinishReason, Request, SamplingParams, SpeculativeEngine, TextStream
from graphkit.errors import ConfigError, InputError
from graphkit.graphs import environment
from graphkit.models.tokenizer import Tokenizer
from graphkit.records import Completion, GenerateRecord

OnResult = Callable[[Prompt, Completion, Mapping[str, float]], None]
_SETTINGS = "max_new_tokens", "temperature", "top_k", "top_p", "min_p"
_PROCESSORS = "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"
_LARGEST_BATCH = 32
"""Further prompts wait in the queue."""
_LARGEST_DEFAULT_CONTEXT = 4096
"""The KV pools hold every running request at its longest, so more is allocated on request only."""


def complete(
    arguments: argparse.Namespace,
    prompts: Sequence[Prompt],
    display: TextDisplay,
    group: RankGroup | None = None,
    on_result: OnResult = lambda *_: None,
) -> GenerateRecord:
    """Continue prompts with the options of ``graphkit generate``; other ranks call ``follow``.

    Raises:
        UsageError: A prompt or the context is too long, or a prompt cannot be used.
        GraphkitError: A folder cannot be loaded, the engine refuses its settings, or a forward
            cannot be captured.
    """
    models = open_models(arguments, group, arguments.quantize, adapts=True)
    tokenizer = models.tokenizer
    with _refusing_prompts():
        prompt_ids = [_encode(prompt, tokenizer, is_chat=arguments.chat) for prompt in prompts]
    settings = _settings(arguments)
    samplings = [_sampling(prompt, tokenizer, settings) for prompt in prompts]
    streams = [
        TextStream(tokenizer, ids, (*arguments.stop, *prompt.stop))
        for prompt, ids in zip(prompts, prompt_ids, strict=True)
    ]
    with _engine(arguments, models, len(prompts)) as engine:
        for ids in prompt_ids:
            if len(ids) >= engine.context_limit:
                raise UsageError(
                    f"a prompt has {len(ids)} tokens, but prompt and output together are limited "
                    f"to {engine.context_limit}. Shorten the prompt, or increase --max-context-len "
                    "if the target allows it."
                )
        with _refusing_prompts():
            requests = [*map(engine.submit, prompt_ids, samplings)]
        capture_seconds = None if arguments.eager else _capture(engine)
        max_new_tokens = sum(request.max_tokens - len(request.prompt_ids) for request in requests)
        by_request = dict(zip(requests, zip(prompts, streams, strict=True), strict=True))
        heads = [_printable(prompt.text) + prompt_end(arguments.chat) for prompt in prompts]
        with display(heads, max_new_tokens) as on_text:
            seconds = _run_to_end(engine, by_request, on_text, on_result)
        completions = tuple(map(_completion, prompts, requests, streams))
        return _record(arguments, models, engine, completions, seconds, capture_seconds)


def follow(arguments: argparse.Namespace, group: RankGroup, num_prompts: int) -> None:
    """Run the engine of ``complete`` on another rank than 0."""
    models = open_models(arguments, group, arguments.quantize, adapts=True)
    with _engine(arguments, models, num_prompts) as engine:
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


def _capture(engine: SpeculativeEngine) -> float:
    """Capture all graphs and return the seconds taken."""
    started = time.perf_counter()
    modes = iter(range(len(engine.runners)))
    with progress_on_stderr() as progress:
        engine.capture(lambda what: progress(next(modes), len(engine.runners), what))
    return time.perf_counter() - started


def _run_to_end(
    engine: SpeculativeEngine,
    left: dict[Request, tuple[Prompt, TextStream]],
    on_text: OnText,
    on_result: OnResult,
) -> float:
    """Generate all tokens of the requests that are left; return the seconds taken."""
    started = time.monotonic()

    def end(request: Request) -> None:
        prompt, stream = left.pop(request)
        on_text(stream.finish(), 0)
        times = {"latency": time.monotonic() - started}
        if request.first_token_at is not None:
            times["time_to_first_token"] = request.first_token_at - started
        on_result(prompt, _completion(prompt, request, stream), times)

    while engine.has_work:
        for request, tokens in engine.step():
            _, stream = left[request]
            stop_ids = request.sampling.stop_token_ids
            piece = stream.append([token for token in tokens if token not in stop_ids])
            on_text(piece, len(tokens))
            if stream.is_stopped:
                engine.abort(request, FinishReason.STOP_STRING)
            if request.is_finished:
                end(request)
    for request in [*left]:  # they ended without a further token
        end(request)
    return time.monotonic() - started


def _encode(prompt: Prompt, tokenizer: Tokenizer, *, is_chat: bool) -> list[int]:
    if prompt.messages is not None:
        return tokenizer.encode_chat(prompt.messages)
    if is_chat:
        return tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
    return tokenizer.encode(prompt.text)


def _sampling(prompt: Prompt, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a prompt: those of its line, else those of the command."""
    unknown = prompt.settings.keys() - {field.name for field in fields(SamplingParams)}
    if unknown:
        raise UsageError(
            f"{prompt.place} has the key {min(unknown)!r}. Use prompt or messages, id, stop, and "
            "attributes of SamplingParams."
        )
    changes = dict(prompt.settings)
    if isinstance(biases := changes.get("logit_bias"), dict):  # keys of JSON are strings
        changes["logit_bias"] = {int(i) if i.isdecimal() else i: b for i, b in biases.items()}
    try:
        return tokenizer.sampling_params(**{**settings, **changes})
    except ConfigError as error:
        if not prompt.settings:
            raise
        raise UsageError(f"{prompt.place}: {error}") from error


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of requests that the command sets."""
    chosen = [name for name in _PROCESSORS if getattr(arguments, name) is not None]
    return {name: getattr(arguments, name) for name in (*_SETTINGS, *chosen)}


def _record(
    arguments: argparse.Namespace,
    models: OpenModels,
    engine: SpeculativeEngine,
    completions: tuple[Completion, ...],
    seconds: float,
    capture_seconds: float | None,
) -> GenerateRecord:
    stats, spec = engine.stats, engine.spec.longest
    sampling = models.tokenizer.sampling_params(**_settings(arguments))
    return GenerateRecord(
        text=completions[0].text,
        completions=completions,
        environment=environment(engine.device),
        backend=engine.runners[0].backend.name,
        algorithm=models.model.algorithm,
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
        acceptance=stats.acceptance,
        gain_over_plain=stats.gain_over_plain,
    )


def _printable(text: str) -> str:
    """Replace the surrogates of bytes that are not UTF-8 by U+FFFD."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _completion(prompt: Prompt, request: Request, stream: TextStream) -> Completion:
    return Completion(
        prompt=_printable(prompt.text),
        text=stream.text,
        finish_reason=request.finish_reason.value if request.finish_reason else "",
        tokens=len(request.output_ids),
        accept_length=request.accept_length,
        token_ids=tuple(request.output_ids),
        rows=request.num_rows,
        acceptance=request.acceptance,
        logprobs=tuple(request.logprobs),
    )
