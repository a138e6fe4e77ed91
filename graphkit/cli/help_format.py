"""The layout of help texts."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a description or an epilog; keeps a block with indented lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        blocks = text.strip().split("\n\n")
        return "\n\n".join(
            block if "\n  " in block else fill(block, width, indent) for block in blocks
        )
