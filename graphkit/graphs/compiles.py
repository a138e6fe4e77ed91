"""Compiles of Triton kernels: many at once before a capture, and those while a program serves.

A kernel that meets a new shape is compiled at its launch, which takes up to seconds. Python's lock
is held for a small part of it, so that threads compile in parallel. Triton calls
``knobs.runtime.jit_post_compile_hook`` then; kernels of torch.compile are compiled without it.
Checked on Triton 3.6 and 3.7, like ``triton.AsyncCompileMode``, whose ``submit`` gets the key of
Triton's cache on disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from graphkit.graphs.backend import Backend
from graphkit.graphs.capture_failure import CaptureFailure
from graphkit.graphs.source_lines import caller_line
from graphkit.ops.kernel_requests import KernelRequests, kernel_requests

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compile:
    """A kernel that was compiled.

    Attributes:
        kernel: Its name.
        shape: Types of its arguments and values of its constants, by name.
        source: The line that launched it.
    """

    kernel: str
    shape: str
    source: str

    @property
    def text(self) -> str:
        """The compile, as a clause."""
        return f"`{self.kernel}` is compiled for {self.shape}"


class CompileWatch:
    """Notes compiles of Triton kernels between ``start`` and ``stop``, on all threads.

    Those of ``compile_ahead`` are left out. A hook that the program has set is called, too.

    Args:
        on_compile: Called with each compile; ``None`` logs a warning.

    Attributes:
        compiles: The compiles so far.
    """

    def __init__(self, on_compile: Callable[[Compile], object] | None = None) -> None:
        self.compiles: list[Compile] = []
        self._on_compile = on_compile or _log

    def start(self) -> None:
        """Begin to watch, if Triton is imported."""
        if "triton" in sys.modules:
            _watches.add(self)
            _install_hook()

    def stop(self) -> None:
        """Stop watching."""
        _watches.discard(self)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Note a compile from what Triton passes to its hook."""
        kernel, compiled = facts["fn"], facts["compile"]
        names = getattr(kernel.jit_function, "arg_names", ())
        parts = [f"{name}: {kind}" for name, kind in compiled["signature"].items()]
        parts += [
            f"{names[place[0]]} = {value!r}"
            for place, value in compiled["constants"].items()
            if isinstance(place, tuple) and place[0] < len(names)
        ]
        shown = [part for part in parts if not part.endswith(": constexpr")]
        found = Compile(kernel.name, ", ".join(shown), caller_line())
        self.compiles.append(found)
        self._on_compile(found)


_watches: WeakSet[CompileWatch] = WeakSet()
"""Watches that have started. One hook serves them all."""
_hook: Callable[..., Any] | None = None
"""The hook that notes compiles. It stays, since a program may set its own around it."""


def _install_hook() -> None:
    """Let Triton report each compile to the watches, unless it does."""
    global _hook
    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook
    if before is not None and before is _hook:
        return

    def hook(**facts: Any) -> Any:
        # One that was replaced notes nothing.
        is_noted = hook is _hook and kernel_requests.get() is None
        for watch in [*_watches] if is_noted else ():
            with suppress(Exception):  # another version of Triton may pass other facts
                watch.note(facts)
        return None if before is None else before(**facts)

    _hook = knobs.runtime.jit_post_compile_hook = hook


def _log(found: Compile) -> None:
    logger.warning("%s while serving, at %s", found.text, found.source or "an unknown line")


Launched = Callable[[str, Mapping[str, Any]], object]
"""Called with the name of a kernel and its arguments by name; ``grid`` is the launch size."""


_observers: list[Launched] = []
"""Functions that are called at launches. Blocks of several threads may overlap."""


@contextmanager
def observed_launches(on_launch: Launched) -> Iterator[None]:
    """Call a function before each launch of a Triton kernel in a block, on all threads.

    Triton launches ``kernel[grid](...)`` through ``JITFunction.run``, for autotuned kernels too. It
    is replaced while such a block runs.
    """
    if "triton" not in sys.modules:
        yield
        return
    from triton.runtime.jit import JITFunction

    if not _observers:
        JITFunction.run = _observed(JITFunction.run)
    _observers.append(on_launch)
    try:
        yield
    finally:
        _observers.remove(on_launch)
        if not _observers:
            JITFunction.run = getattr(JITFunction.run, "__wrapped__", JITFunction.run)


def _observed(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def observed(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        for on_launch in () if warmup else tuple(_observers):
            with suppress(Exception):  # another version of Triton may keep its names elsewhere
                named = dict(zip(self.arg_names, args, strict=False)) | kwargs
                on_launch(self.fn.__name__, named | {"grid": grid})
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    return observed


def compile_ahead(
    backend: Backend, functions: Iterable[Callable[[], Any]]
) -> Sequence[Callable[[], Any]]:
    """Run functions so that the kernels of their ops are compiled in parallel, and wait for them.

    Does nothing if ``backend.compiles_kernels`` is False. The functions run as in a warm-up, but
    ops whose kernels are not compiled are computed by torch; see ``KernelRequests``. Kernels of
    other code are compiled one after the other, as they are launched. Kernels in Triton's cache on
    disk are loaded at once: if the first function needs no others on any rank, the rest is not run.
    After a function that fails on one device no other runs: a warm-up fails alike.

    Args:
        backend: Backend of the graphs that are captured next, in a session of it.
        functions: What to run. The first one is to need most of the kernels.

    Returns:
        The functions that need a warm-up: those that did not run, and the first one if kernels were
        compiled, which ran in part by torch.

    Raises:
        CaptureFailure: A function failed on one of several ranks, or a rank did not run it.
    """
    functions = list(functions)
    if not backend.compiles_kernels:
        return functions
    import triton

    if triton.runtime._async_compile.active_mode.get() is not None:
        return functions  # the mode is of the program, which decides when to wait
    began = time.perf_counter()
    workers, passed = len(os.sched_getaffinity(0)), 0
    with (
        ThreadPoolExecutor(workers, "graphkit-compile") as pool,
        _compiling(pool, backend.device) as compiled,
    ):
        for function in functions:
            try:
                backend.warm_up(function)
            except CaptureFailure as failure:
                if failure.is_shared:  # collectives without partners have ended the ranks' group
                    raise
                logger.debug("A pass that compiles kernels failed: %s", failure)
                break
            if not backend.on_any_rank(bool(compiled)):
                return functions[1:]
            passed += 1
        requested = time.perf_counter()
    if compiled:
        logger.info(
            "Compiled %d kernels in %.1f s, %.1f s of it after the last request.",
            len(compiled), time.perf_counter() - began, time.perf_counter() - requested,
        )  # fmt: skip
    return functions[:1] + functions[max(passed, 1) :]


@contextmanager
def _compiling(pool: Executor, device: torch.device) -> Iterator[set[str]]:
    """Compile the kernels of ops that a block runs, and yield the keys of those.

    A kernel that cannot be compiled raises its error when it is launched.
    """
    import triton

    mode = triton.AsyncCompileMode(pool, ignore_errors=True)
    submitted = set[str]()
    submit = mode.submit

    def load_or_submit(
        key: str, compile_kernel: Callable[[], Any], finish: Callable[[Any], None]
    ) -> Any:
        if key not in submitted and _is_stored(key):
            kernel = compile_kernel()  # loads it
            finish(kernel)
            return kernel
        submitted.add(key)
        return submit(key, partial(_compiled, compile_kernel, device), finish)

    def request(
        kernel: Any, grid: tuple[int, ...], args: list[Any], options: dict[str, Any]
    ) -> bool:
        made = kernel.warmup(*args, grid=grid, **options)
        return not isinstance(made, triton.FutureKernel)

    mode.submit = load_or_submit
    with KernelRequests(request).collected(), mode:
        yield submitted


def _compiled(compile_kernel: Callable[[], Any], device: torch.device) -> Any:
    """Return a compiled kernel that a device has loaded.

    Triton 3.6 calls a C compiler for the function that launches a kernel, when it is first needed.
    A kernel that cannot be loaded counts as not compiled: its launch raises the error.
    """
    kernel = compile_kernel()
    if device.type == "cuda":
        with torch.cuda.device(device):
            _ = kernel.run
    return kernel


def _is_stored(key: str) -> bool:
    """Return whether Triton's cache on disk has the kernel of a key."""
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    if knobs.compilation.always_compile:
        return False
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    folder = getattr(manager, "cache_dir", None)  # caches elsewhere have none
    return folder is not None and any(Path(folder).glob("__grp__*"))
