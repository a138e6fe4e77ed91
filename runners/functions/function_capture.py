"""``graphkit.capture``: a function of tensors, captured per batch size and compared with itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from graphkit.buffers import StepInputs
from graphkit.config import BufferSizes
from graphkit.errors import ConfigError, GraphkitError, OutputError, short_repr
from graphkit.graphs import Attribution, Backend, StateSnapshot, backend_for, named_tensors
from graphkit.graphs.capture_failure import describe_exception
from graphkit.graphs.snapshot import check_restorable
from graphkit.records import count_of
from graphkit.runners import Output, Runner
from graphkit.runners.capture_checks import host_objects
from graphkit.runners.comparison import GRAPH_DIFFERS, Rounding, StepComparison, check_tolerance
from graphkit.runners.functions.arguments import Arguments
from graphkit.runners.functions.captured_function import CapturedFunction
from graphkit.runners.functions.results import Results
from graphkit.runners.functions.row_checks import HOST_ADVICE, ROW_ADVICE, RowChecks
from graphkit.runners.functions.written_tensors import WrittenTensors
from graphkit.runners.step import forward_name
from graphkit.runners.targets import CaptureTarget
from graphkit.spec import ForwardMode, SpecConfig

_NO_DRAFTS = SpecConfig("NONE", num_steps=0, topk=1, num_draft_tokens=1)


def capture(
    fn: Callable[..., Any],
    example: Any,
    *,
    batch_sizes: Iterable[int],
    device: torch.device | str | None = None,
    backend: Backend | None = None,
    pad_values: Any = None,
    mutable_state: Mapping[str, torch.Tensor] | None = None,
    weights: nn.Module | Mapping[str, torch.Tensor] | None = None,
    tolerance: float = 1.0,
    attribution: Attribution | None = None,
) -> CapturedFunction:
    """Capture a function of tensors whose first dimension is the batch, once per batch size.

    A call of the result pads the batch to the smallest captured size, replays that graph and
    returns the live rows. Names, dtypes and row shapes of arguments and results are learnt from
    the example::

        encode = gk.capture(model, {"input_ids": ids, "attention_mask": mask}, batch_sizes=[1, 8])
        hidden = encode(input_ids=other_ids, attention_mask=other_mask).last_hidden_state

    Each row of the results must depend on the same row of the arguments alone: after the capture,
    ``fn`` runs on rows that differ from the example in all rows but one, of which the results must
    stay the same. Pad rows must not write into what rows of a batch have, see ``pad_values``. Then
    rows of the example are replayed at every size and compared with ``fn``. No
    gradients are recorded.

    Args:
        fn: A function or a module in evaluation mode. It returns tensors with a row per row of its
            arguments, alone or in tuples, lists, dicts and dataclasses, in which ``None`` stands
            for a result that it leaves out. It does not change its arguments. Random numbers that
            it needs are arguments, too.
        example: Arguments of a call, each with the same number of rows: a tensor or a tuple of
            tensors (positional arguments), tensors by name (keyword arguments), or a dataclass of
            tensors (the only argument). Bind other arguments with ``functools.partial``.
            Where the example has a tensor, on the CPU or on the device, batches should have it,
            too: the graph then reads it without another copy.
        batch_sizes: Sizes to capture, in rows. Larger batches run without a graph.
        device: Device of ``fn``; ``None`` selects the device of the example.
        backend: As for ``Runner``.
        pad_values: The number that fills pad rows of an argument, of its dtype: by name, or in the
            form of the example, with ``None`` for the default. That is the smallest finite number
            of the argument in the example, which is a valid length or index. A function that
            writes into tensors by index, such as KV slots, needs an index that no row of a batch
            uses.
        mutable_state: Tensors that ``fn`` changes, by name. Capture restores them.
        weights: The model, or its weights by name, for names in records. ``None`` selects the
            modules that ``fn`` is, is bound to, or reads from variables.
        tolerance: Multiple of the usual rounding by which padded and unpadded results may differ,
            as ``graphkit audit --tolerance`` takes it. float32 convolutions may need more than 1
            with TF32, which cuDNN uses by default.
        attribution: As for ``Runner.capture``.

    Raises:
        CaptureError: The function cannot be captured.
        ConfigError: The example or a setting is invalid, all weights of ``fn`` are on another
            device, ``fn`` raised an error for the example,
            a module that ``fn`` uses is in training mode, or pad rows write into tensors that rows
            of a batch have.
        DeviceError: The device does not exist.
        OutputError: The function returns anything but tensors with a row per row of its arguments,
            is random, a row depends on others, or a replay differs from the function.
    """
    if not callable(fn):
        raise ConfigError(f"fn must be callable, got {short_repr(fn)}.", field="fn")
    check_tolerance(tolerance)
    objects = host_objects(fn)
    weights = objects.held_weights() if weights is None else weights
    sizes = _checked_sizes(batch_sizes)
    arguments = Arguments(fn, _function_name(fn), example, pad_values)
    backend = _backend(arguments, device, backend)
    objects.check_weights(backend.device)
    written = WrittenTensors(fn, check_restorable(mutable_state or {}))
    try:
        with StateSnapshot({}, backend.device):
            results = _run_example(arguments, max(sizes), backend.device, written)
        target = _target(fn, arguments, results, sizes, weights, mutable_state)
        runner = target.runner(ForwardMode.STEP, device=backend.device, backend=backend)
        try:
            record = runner.capture(attribution=attribution)
            rounding = Rounding(target.sizes.dtype, tolerance)
            RowChecks(
                arguments,
                results,
                written,
                rounding,
                backend.device,
                max(sizes),
                pad_values is not None,
            ).check()
            written.release()
            _compare(runner, target, rounding, written.undeclared())
        except BaseException:
            runner.close()
            raise
    finally:
        written.restore()
    return CapturedFunction(runner, arguments, results, target, record)


def _function_name(fn: Any) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return forward_name(fn).rpartition("<locals>.")[2]


def _checked_sizes(sizes: object) -> list[int]:
    checked = list(sizes) if isinstance(sizes, Iterable) else []
    if not checked or not all(type(size) is int and size > 0 for size in checked):
        raise ConfigError(
            f"batch_sizes must be ints >= 1, at least one, got {short_repr(sizes)}.",
            field="batch_sizes",
        )
    return checked


def _backend(
    arguments: Arguments, device: torch.device | str | None, backend: Backend | None
) -> Backend:
    """Return the backend of a device, by default of the device of the example."""
    if backend is None:
        backend = backend_for(arguments.device if device is None else device)
    elif device is not None:
        backend_for(device, backend)  # raises if they contradict each other
    if arguments.device.type != "cpu" and arguments.device != backend.device:
        raise ConfigError(
            f"the example of {arguments.name} is on {arguments.device}, but the function is to run "
            f"on {backend.device}. Move the example there, or to the CPU.",
            field="device",
        )
    return backend


def _target(
    fn: Callable[..., Any],
    arguments: Arguments,
    results: Results,
    sizes: list[int],
    weights: nn.Module | Mapping[str, torch.Tensor] | None,
    mutable_state: Mapping[str, torch.Tensor] | None,
) -> CaptureTarget:
    """Return the function as a target of one mode."""

    def forward(inputs: StepInputs) -> Output:
        return results.output(arguments.call(inputs))

    forward.__qualname__ = arguments.name
    forward.__wrapped__ = fn  # type: ignore[attr-defined]  # whose host values graphs may keep
    return CaptureTarget(
        name=arguments.name,
        spec=_NO_DRAFTS,
        sizes=BufferSizes(
            max_batch_size=max(sizes),
            max_context_len=1,  # a function has no requests, hidden states or vocabulary
            hidden_size=1,
            vocab_size=1,
            dtype=_compute_dtype(arguments, results, weights),
        ),
        forwards={ForwardMode.STEP: forward},
        sample_batch=partial(_sample_batch, arguments),
        weights=weights,
        mutable_state=mutable_state,
        batch_sizes=sizes,
        inputs_type=arguments.inputs_type,
        output_type=results.output_type,
        served_modes=[ForwardMode.STEP],
    )


def _run_example(
    arguments: Arguments, largest: int, device: torch.device, written: WrittenTensors
) -> Results:
    """Run the function on rows of the example and return the form of its results.

    Two batch sizes tell a dimension of rows from one that only happens to have as many entries. A
    single row must do, too.
    """
    returned, first = {}, min(arguments.num_rows, largest)
    for count in dict.fromkeys((first, first + 1, 1)):
        rows = arguments.example_rows(index % arguments.num_rows for index in range(count))
        try:
            with written.watching():
                returned[count] = arguments.run(rows, device)
        finally:
            written.restore()
    return Results(arguments.name, returned)


def _compute_dtype(
    arguments: Arguments,
    results: Results,
    weights: nn.Module | Mapping[str, torch.Tensor] | None,
) -> torch.dtype:
    """Return the coarsest floating-point dtype of weights, arguments and results.

    Dtypes of one byte do not count: weights in FP8 are converted before they are multiplied.
    """
    tensors: Collection[object] = named_tensors(weights).values()
    used = {weight.dtype for weight in tensors if isinstance(weight, torch.Tensor)}
    used |= arguments.dtypes | results.dtypes
    floats = [dtype for dtype in used if dtype.is_floating_point and dtype.itemsize > 1]
    return max(floats, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _sample_batch(arguments: Arguments, _mode: ForwardMode, count: int, seed: int) -> StepInputs:
    """Return rows of the example, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    return arguments.sample(
        torch.randint(arguments.num_rows, (count,), generator=generator).tolist()
    )


def _compare(
    runner: Runner[Any, Any], target: CaptureTarget, rounding: Rounding, undeclared: list[str]
) -> None:
    """Compare replays of rows of the example with the function, with a pad row where possible."""
    with runner.without_stats():
        for size in runner.table:
            batch = target.batch(runner.mode, max(size - 1, 1), size)
            try:
                mismatch = StepComparison(runner, batch, size, rounding).first_mismatch()
            except GraphkitError:
                raise
            except Exception as error:  # of the function, for a number of rows not run before
                raise ConfigError(
                    f"{target.name} raised an error for {count_of(batch.batch_size, 'row')} of the "
                    f"example: {describe_exception(error)}.",
                    field="fn",
                ) from error
            if mismatch is not None:
                distance = f" ({mismatch.distance})" if mismatch.distance else ""
                where = (
                    f"row {mismatch.row} of `{mismatch.field}` is {mismatch.got} instead of "
                    f"{mismatch.expected}{distance} with "
                    f"{count_of(batch.batch_size, 'live row')} at batch size {size}"
                )
                advice = f"{HOST_ADVICE}." if mismatch.kind == GRAPH_DIFFERS else ROW_ADVICE
                if undeclared:
                    names = ", ".join(undeclared)
                    advice = f"The function writes {names}: pass it as mutable_state. {advice}"
                raise OutputError(f"{target.name}: {mismatch.kind}: {where}. {advice}")
