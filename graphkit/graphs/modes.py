"""Whose turn it is to have a dispatch mode on."""

from __future__ import annotations

from threading import RLock

MODES = RLock()
"""Held while a dispatch mode of ours is on. Part of what a mode changes torch keeps for the whole
process: modes of two threads that overlap leave it wrong for good, and compiled functions run as
written from then on. Entering a capture of another thread waits, one within its own does not."""
