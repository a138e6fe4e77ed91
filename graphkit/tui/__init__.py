"""The live screen: a saved record to walk through, with no GPU and no model.

A page (``pages``) is what a view shows, as data; a listing is a page under one look: opened,
sorted, filtered, searched. Both are plain Python. The screen and the sheet draw them by textual.
"""

from graphkit.tui.app import InspectApp

__all__ = ["InspectApp"]
