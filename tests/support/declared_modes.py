"""The forward modes that a test of every mode runs on."""

import pytest

from graphkit.runners import RUNNERS
from graphkit.spec import ForwardMode

MODES = [mode for mode in RUNNERS if mode is not ForwardMode.STEP]
"""All modes with a runner but STEP, whose fields a caller declares."""

every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
