"""The number of threads that a command computes with on the CPU."""

from __future__ import annotations


def use_one_thread() -> None:
    """Compute with one thread, for the small models that ship with graphkit.

    Their operations are so short that waiting for a second thread costs more than it saves, many
    times more on a busy machine.
    """
    import torch

    torch.set_num_threads(1)
