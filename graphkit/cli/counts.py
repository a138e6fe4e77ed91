"""Whole numbers as arguments."""

from __future__ import annotations

import argparse


def parse_count(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises:
        ArgumentTypeError: The text is not such a number, or has ten digits or more.
    """
    if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
