"""Writes generated pages below ``reference``, where Sphinx finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sphinx.application import Sphinx


def write_pages(app: Sphinx, folder: str, texts: Mapping[str, str]) -> None:
    """Write the pages of a folder that have changed, and remove those that are gone.

    Args:
        app: The build.
        folder: Folder below ``reference``.
        texts: Text of each page by its name.
    """
    where = Path(app.srcdir) / "reference" / folder
    where.mkdir(exist_ok=True)
    for path in where.glob("*.rst"):
        if path.stem not in texts:
            path.unlink()
    for name, text in texts.items():
        path = where / f"{name}.rst"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
