"""Bindings, footer and help agree with the table of keys."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from textual import events

from graphkit.views.tui.keys import KEYS


class Seen(NamedTuple):
    """What there is to see of a screen."""

    title: str
    row: str
    at: int
    rows: int
    sort: str
    is_reversed: bool
    opened: int
    focus: str
    depth: int
    is_running: bool


def seen(on):
    listing, state = on.listing, on.listing.state
    focus = on.app.screen.query_one("#question").render() if on.app.focused else ""
    return Seen(
        listing.page.title, on.selected, listing.at, len(listing.lines), state.sort,
        state.is_reversed, len(state.opened), str(focus), on.depth,
        on.app._exit is False,
    )  # fmt: skip


GRAPH = ("down", "down", "down", "enter")
"""From the overview to TARGET_VERIFY 8."""
DOES = {
    "enter": (("down",), lambda was, now: now.title == "TARGET_VERIFY 1"),
    "escape": (GRAPH, lambda was, now: now.title == "tiny" and now.row == "size 8"),
    "tab": (GRAPH, lambda was, now: now.title == "TARGET_VERIFY 1"),
    "shift+tab": (GRAPH, lambda was, now: now.title == "TARGET_VERIFY 4"),
    "b": (GRAPH, lambda was, now: now.title == "buffers of TARGET_VERIFY"),
    "c": (GRAPH, lambda was, now: now.title == "from TARGET_VERIFY 4 to TARGET_VERIFY 8"),
    "K": (GRAPH, lambda was, now: now.title == "kernels of TARGET_VERIFY 8"),
    "t": (GRAPH, lambda was, now: now.title == "timeline of TARGET_VERIFY 8"),
    "m": (GRAPH, lambda was, now: now.title == "memory of TARGET_VERIFY 8"),
    "up": (GRAPH[:2], lambda was, now: now.at == was.at - 1),
    "k": (GRAPH[:2], lambda was, now: now.at == was.at - 1),
    "down": ((), lambda was, now: now.at == was.at + 1),
    "j": ((), lambda was, now: now.at == was.at + 1),
    "pageup": ((*GRAPH, "+", "end"), lambda was, now: was.at - 20 < now.at < was.at - 10),
    "pagedown": ((*GRAPH, "+"), lambda was, now: was.at + 10 < now.at < was.at + 20),
    "home": (GRAPH[:3], lambda was, now: now.at == 0),
    "g": (GRAPH[:3], lambda was, now: now.at == 0),
    "end": ((), lambda was, now: now.at == now.rows - 1),
    "G": ((), lambda was, now: now.at == now.rows - 1),
    "right": (("left",), lambda was, now: now.rows == was.rows + 3),
    "l": (("left",), lambda was, now: now.rows == was.rows + 3),
    "left": ((), lambda was, now: now.rows == was.rows - 3),
    "h": (("down",), lambda was, now: now.row == "TARGET_VERIFY" and now.rows == was.rows),
    "+": (GRAPH, lambda was, now: now.rows > 40 > was.rows),
    "-": (("down",), lambda was, now: now.rows == 2 and now.row == "TARGET_VERIFY"),
    "/": ((), lambda was, now: now.focus == "filter:"),
    "s": ((), lambda was, now: (was.sort, now.sort) == ("", "mode and size")),
    "S": ((), lambda was, now: now.is_reversed and not was.is_reversed),
    "?": ((), lambda was, now: now.title == "keys" and now.depth == was.depth + 1),
    "q": ((), lambda was, now: not now.is_running),
    "ctrl+c": ("/", lambda was, now: not now.is_running),
}
"""For each key: the keys to press before it, and a test of the state before and after."""


def test_every_key_of_the_table_is_tested_here():
    assert {one for key in KEYS for one in key.key.split(",")} == set(DOES)


def test_no_key_is_bound_twice():
    every = [one for key in KEYS for one in key.key.split(",")]
    assert len(every) == len(set(every))


QUITS = ("q", "ctrl+c")


@pytest.mark.slow
def test_every_key_does_what_the_table_says(capture, drive):
    """In one app, which starts again with the first page for each key."""

    async def script(on):
        for key in DOES.keys() - set(QUITS):
            before, does = DOES[key]
            await on.restart(capture)
            await on.keys(*before)
            was = seen(on)
            await on.keys(key)
            now = seen(on)
            assert does(was, now), f"{key}: {was}\n{now}"

    drive(capture, script)


@pytest.mark.parametrize("key", QUITS)
def test_a_key_quits(capture, drive, key):
    before, does = DOES[key]

    async def script(on):
        await on.press(*before)
        was = seen(on)
        await on.press(key)
        return was, seen(on)

    was, now = drive(capture, script)
    assert does(was, now)


def test_keys_that_arrive_at_once_are_handled_in_order(capture, drive):
    async def script(on):
        await on.press(*GRAPH[:3])
        for key, character in (("enter", "\r"), ("plus", "+"), ("end", None), ("s", "s")):
            on.app.post_message(events.Key(key, character))
        await on.settle()
        return seen(on)

    now = drive(capture, script)
    assert (now.title, now.rows, now.row, now.sort) == (
        "TARGET_VERIFY 8", 48, "memcpy", "module and node",
    )  # fmt: skip


def test_the_help_lists_the_table(capture, drive):
    async def script(on):
        await on.press("?")
        return [on.listing.cells(line.row) for line in on.listing.lines]

    *keys, (click, _) = drive(capture, script)
    assert keys == [(key.key_display, key.tooltip) for key in KEYS]
    assert click == "click"


def test_keys_are_text_while_the_prompt_is_open(capture, drive):
    async def script(on):
        await on.press("/", *"qsbN?")
        await on.press("tab", "down")
        return on.app.focused.value, seen(on)

    typed, now = drive(capture, script)
    assert typed == "qsbN?"
    assert (now.title, now.at, now.is_running, now.focus) == ("tiny", 0, True, "filter:")


def test_the_footer_shows_only_the_keys_that_work_while_typing(capture, drive):
    async def script(on):
        await on.press("/")
        return on.lines[-1]

    assert drive(capture, script).split() == ["esc", "back"]
