"""Records the CUDA graphs of any Python program, which need not know of it.

The program runs in a Python of its own whose PYTHONPATH begins with ``startup``: every Python that
it starts, and each of theirs, runs the ``sitecustomize`` in there, which waits for torch. Each
process writes what it captures at once, as a part; in the end the parts become one record.

To the program its graphs are the same, but each keeps its template, which costs host memory. None
is replayed for the record's sake, so none is timed.

Out of reach are children whose environment lacks PYTHONPATH or that are told to ignore it (``-I``,
``-E``, ``-S``), and graphs that are captured without ``torch.cuda.CUDAGraph``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from graphkit.recording.launch import run_python
from graphkit.recording.parts import PartWriter, Recorded, put_together

__all__ = ["PartWriter", "Recorded", "record_program"]


def record_program(words: Sequence[str]) -> Recorded:
    """Run ``python WORDS`` and record every CUDA graph that it and its children capture.

    Stdin, stdout, stderr, working directory, arguments and exit code are those of plain Python.

    Raises:
        ConfigError: Our own Python ignores PYTHONPATH, and so would the program's.
    """
    # A child that outlives the program may still write while the folder goes.
    with tempfile.TemporaryDirectory("-graphkit-record", ignore_cleanup_errors=True) as folder:
        exit_code = run_python(words, Path(folder))
        return put_together(Path(folder), words, exit_code)
