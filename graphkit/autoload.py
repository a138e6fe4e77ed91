"""Hooks into the CUDA graphs of any process that imports torch, if its environment asks for it.

``pyproject.toml`` registers ``begin_audit`` as an entry point of the group ``torch.backends``.
``import torch`` calls it at its end, since torch 2.5, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is
set (https://docs.pytorch.org/docs/stable/accelerator/autoload.html). A ``.pth`` file would run at
every start of Python, also without torch, and would be missing from editable installations.

Without the variables, ``import torch`` imports this file and ``graphkit/__init__.py``. A Python
that does not import torch runs nothing of graphkit.
"""

from __future__ import annotations

import os
import sys

_VARIABLES = "GRAPHKIT_AUDIT", "GRAPHKIT_RECORDING"
"""``audit_options.REPORT_VARIABLE`` and ``process_files.FOLDER_VARIABLE``."""


def begin_audit() -> None:
    """Audit or record the graphs of this process if the environment asks for it.

    An error is printed to stderr and the program continues: torch would fail to import otherwise.

    Raises:
        SystemExit: The report cannot be written. The process ends with exit code 2, so that a run
            that audits nothing does not pass for one without findings.
    """
    if not any(map(os.environ.get, _VARIABLES)):
        return
    try:
        from graphkit.audit.foreign.following import hook_into

        hook_into(sys.modules["torch.cuda.graphs"].CUDAGraph)
    except Exception as error:
        what = "audit" if os.environ.get("GRAPHKIT_AUDIT") else "record"
        if sys.stderr is not None:
            text = f"process {os.getpid()} is not {what}ed: {error}"
            sys.stderr.write(f"graphkit {what}: {text}\n")
        if getattr(error, "field", None) == "GRAPHKIT_AUDIT":
            raise SystemExit(2) from None
