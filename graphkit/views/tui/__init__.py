"""The live screen: walks through a saved record, without a GPU and without a model.

It shows the pages of ``graphkit.views.pages``. A ``Listing`` holds a page with its state: open
rows, order, filter and cursor. Pages and listings are plain Python; textual draws them.
"""

from graphkit.views.tui.screen import InspectApp

__all__ = ["InspectApp"]
