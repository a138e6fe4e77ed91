"""Whose turn it is to have a dispatch mode on."""

from __future__ import annotations

from threading import RLock

MODES = RLock()
"""Held while a dispatch mode of ours is on. Part of what a mode changes torch keeps for the whole
process: modes of two threads that overlap leave it wrong for good, and compiled functions run as
written from then on. The recorder waits for its turn. Attribution does without: threads that wait
for one another inside of their captures, as ranks do, must not wait for it too."""
