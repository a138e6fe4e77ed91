"""The layout of help texts."""

from __future__ import annotations

import argparse
import textwrap


class HelpFormatter(argparse.HelpFormatter):
    """Wraps the paragraphs of a description or an epilog; keeps a block with indented lines.

    Names such as ``pool-poison`` stay on one line.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            block
            if "\n  " in block
            else textwrap.indent("\n".join(self._split_lines(block, width - len(indent))), indent)
            for block in text.strip().split("\n\n")
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)
