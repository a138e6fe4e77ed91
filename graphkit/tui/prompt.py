"""The line in which words are typed: to search, to filter, to name a file."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Input, Static


class Prompt(Horizontal):
    """Hidden until it asks; then it holds the keyboard until it is answered or dismissed."""

    DEFAULT_CSS = """
    Prompt { height: 1; display: none; }
    Prompt Static { width: auto; text-style: bold; }
    Prompt Input, Prompt Input:focus { border: none; height: 1; padding: 0 1; width: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._label, self._input = Static(), Input(select_on_focus=False)
        self._then: Callable[[str], None] = lambda _words: None

    def compose(self) -> ComposeResult:
        """What is asked for, and the words that are typed."""
        yield self._label
        yield self._input

    def ask(self, what: str, words: str, then: Callable[[str], None]) -> None:
        """Ask for words, with these to begin with; the answer goes to ``then``."""
        self._then = then
        self._label.update(f"{what}:")
        self._input.value = words
        self._input.cursor_position = len(words)
        self.display = True
        self._input.focus()

    def dismiss(self) -> None:
        """Hide, unanswered."""
        self.display = False
        self.screen.set_focus(None)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Hide, and hand on what was typed."""
        event.stop()
        self.dismiss()
        self._then(event.value)
