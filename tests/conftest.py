"""What holds for every test: a plain terminal, and no GPU test without a GPU."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]  # pytest takes it from the topmost conftest alone

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


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    """Output looks the same whatever terminal, or CI, the tests run in."""
    for name in TERMINAL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


def has_cuda():
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors: a second thread costs more than it brings, much more on a busy machine."""
    import torch

    torch.set_num_threads(1)
