"""The view of the keys."""

from __future__ import annotations

from graphkit.tui.keys import KEYS
from graphkit.views.pages.page import Column, Item, Page


def help_page() -> Page:
    """Every key and what it does, from the table that also binds them."""
    return Page(
        title="keys",
        columns=(Column(name="key"), Column(name="what it does", least=24)),
        items=tuple(
            Item(key=key.keys, values=(key.shown, key.meaning), note=key.meaning) for key in KEYS
        ),
    )
