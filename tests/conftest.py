"""Settings of all tests: a plain terminal, one CPU thread, GPU tests with a GPU, order of files."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import nullcontext

import pytest

pytest_plugins = ["pytester"]  # pytest reads it only in the topmost conftest

TERMINAL_VARIABLES = (
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "COLORTERM",
    "COLUMNS",
    "FORCE_COLOR",
    "JUPYTER_COLUMNS",
    "JUPYTER_LINES",
    "LINES",
    "NO_COLOR",
    "PYTHON_COLORS",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
)


@pytest.fixture(autouse=True, scope="session")
def plain_terminal():
    """Remove variables that change output, so that it is the same in a terminal and in CI."""
    with pytest.MonkeyPatch.context() as patch:
        for name in TERMINAL_VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm")
        yield


@pytest.fixture(autouse=True)
def own_algorithms():
    """Forget the algorithms that a test registers, since names are registered once."""
    from graphkit.spec import algorithms

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithms, "_custom", dict(algorithms._custom))
        yield


def pytest_collection_modifyitems(items):
    # A worker runs whole files. One that starts a slow file last works on when the others are done.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    """Skip tests whose fixtures load recurrent layers with a transformers that is too old."""
    return (yield from without_old_layers())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip tests that load recurrent layers with a transformers that is too old."""
    return (yield from without_old_layers())


def without_old_layers():
    from graphkit.errors import ConfigError

    try:
        return (yield)
    except ConfigError as error:
        if "has recurrent layers, which need transformers" in str(error):
            pytest.skip(str(error))
        raise


def has_cuda():
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Compute with one thread, as do processes that tests start: small tensors gain nothing."""
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure():
    """Collect no garbage while modules are imported and tests are found."""
    gc.disable()


def pytest_collection_finish():
    """Exclude modules and tests from collections: they are 700,000 objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def search_of_tests():
    """Exclude imported modules and tests from searches of the process, too."""
    from graphkit.graphs import tracked_objects

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracked_objects, "_thawed", nullcontext)
        yield


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """A background job ignores SIGINT, and so do its children. Tests send it, so undo that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
