"""Colours repeat what the text says: the part of a step, and the share of its time."""

from __future__ import annotations

import pytest

from graphkit.views.tui.texts import heat_style, part_style

GRAPH = ("down", "down", "down", "enter")

PARTS = (
    "refresh", "metadata", "draft", "build", "verify", "accept", "extend", "norm", "attn", "mlp",
    "embed", "head",
)  # fmt: skip


def coloured(on):
    """The colours of each row by its first word: those of its part and bar, and of its share."""
    rows = on.app.screen.query_one("RowList")
    found = {}
    for y in range(1, len(on.listing.lines) + 1):
        strip = rows.render_line(y)
        colours = [
            segment.style.color.name
            for segment in strip
            if segment.style and segment.style.color and segment.text.strip()
        ]
        found[strip.text.lstrip("> ▾▸").split()[0]] = colours
    return found


def test_part_and_bar_have_the_colour_of_the_part_and_a_share_that_of_its_heat(capture, drive):
    async def script(on):
        await on.press(*GRAPH, "down")
        return coloured(on)

    rows = drive(capture, script, (120, 40))
    assert rows["self_attn"] == ["red", "green", "green"]
    assert rows["mlp"] == ["yellow", "magenta", "magenta"]
    assert rows["input_layernorm"] == ["bright_blue", "bright_blue"]
    assert rows["layers"] == ["red"], "of several parts, only the share is coloured"
    assert rows["memset"] == [], "the selected row is reversed and has no other colour"


def test_nodes_in_the_timeline_have_the_colour_of_their_part(capture, drive):
    async def script(on):
        await on.press(*GRAPH, "t", "end")
        return coloured(on)

    rows = drive(capture, script, (120, 60))
    assert rows["_paged_attention"] == ["green", "green"]
    assert rows["_rms_norm"] == ["bright_blue", "bright_blue"]


def test_every_part_has_a_colour_and_red_means_heat_or_an_error():
    colours = {part: part_style(part).color for part in PARTS}
    assert all(colours.values())
    assert "red" not in {colour.name for colour in colours.values()}
    assert part_style("").color is None


@pytest.mark.parametrize(
    ("share", "colour", "dim"),
    [(0.2, "red", False), (0.19, "yellow", False), (0.04, None, False), (0.009, None, True)],
)
def test_heat_has_four_steps(share, colour, dim):
    style = heat_style(share)
    assert (style.color.name if style.color else None, bool(style.dim)) == (colour, dim)
    assert heat_style(None).color is None


def test_the_text_names_what_the_colours_show(capture, drive):
    async def script(on):
        await on.press(*GRAPH)
        return on.lines

    lines = drive(capture, script, (120, 24))
    attention = next(line for line in lines if "self_attn" in line)
    assert attention.split()[-5:-1] == ["29.6%", "██▍", "attn", "module"]
