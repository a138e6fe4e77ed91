"""Records the CUDA graphs of any Python program without changes to the program.

The program runs in a new Python whose PYTHONPATH begins with the folder ``startup``. Every Python
process of the program runs the ``sitecustomize`` in that folder, which hooks into torch once torch
is imported. Each process writes every captured graph to a file at once; at the end the files are
combined into one record.

The program sees the same graphs as without a recording. Each graph also keeps its template, which
costs host memory. Recorded graphs are never replayed for the record, so they carry no timings.

Not recorded are child processes whose environment lacks PYTHONPATH or whose Python ignores it
(``-I``, ``-E``, ``-S``), and graphs that are captured without ``torch.cuda.CUDAGraph``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from graphkit.recording.graph_files import GraphFileWriter, RecordedProgram, collect
from graphkit.recording.launch import run_python

__all__ = ["GraphFileWriter", "RecordedProgram", "record_program"]


def record_program(arguments: Sequence[str]) -> RecordedProgram:
    """Run ``python ARGUMENTS`` and record every CUDA graph that it and its children capture.

    Standard streams, working directory, arguments and exit code are as under plain Python.

    Raises:
        ConfigError: This interpreter ignores PYTHONPATH, and the program's would ignore it too.
    """
    # A child process that outlives the program may still write while the folder is removed.
    with tempfile.TemporaryDirectory("-graphkit-record", ignore_cleanup_errors=True) as folder:
        exit_code = run_python(arguments, Path(folder))
        return collect(Path(folder), arguments, exit_code)
