"""How many threads a command computes with on the CPU."""

from __future__ import annotations


def use_one_thread() -> None:
    """For the models that ship with graphkit: a second thread costs them more than it brings.

    On a busy machine many times more, since every small operation then waits for both.
    """
    import torch

    torch.set_num_threads(1)
