"""The first line of the screen: the path of pages, the module of the row, and the device."""

from __future__ import annotations

from graphkit.records import Node
from graphkit.views.tui.texts import common_module, place_line

CRUMBS = ("engine", "TARGET_VERIFY > size 8", "timeline")


def line(width, module="model.layers.0", device="NVIDIA H200", crumbs=CRUMBS):
    return place_line(crumbs, module, device, width).plain


def test_it_has_target_mode_size_page_module_and_device():
    assert (
        line(80)
        == f"{'engine > TARGET_VERIFY > size 8 > timeline > model.layers.0':67}  NVIDIA H200"
    )
    assert len(line(80)) == 80


def test_what_does_not_fit_is_left_out_the_page_last():
    assert line(67) == "engine > TARGET_VERIFY > size 8 > timeline > model.la…  NVIDIA H200"
    assert line(60) == f"{'engine > TARGET_VERIFY > size 8 > timeline':49}NVIDIA H200"
    assert line(52).rstrip() == "engine > TARGET_VERIFY > size 8 > timeline > model.…"
    assert line(40).rstrip() == "… > TARGET_VERIFY > size 8 > timeline"
    assert line(14).rstrip() == "… > timeline"
    assert line(10).rstrip() == "… > timel…"


def test_a_row_of_no_module_adds_nothing():
    assert line(80, module="", device="").rstrip() == "engine > TARGET_VERIFY > size 8 > timeline"


def test_the_page_is_bold_and_the_path_around_it_is_not():
    spans = place_line(CRUMBS, "m", "", 80).spans
    (bold,) = (span for span in spans if "bold" in str(span.style))
    assert line(80)[bold.start : bold.end] == "timeline"


def nodes(*modules):
    return [
        Node(index=at, kind="kernel", name="k", short_name="k", module=module)
        for at, module in enumerate(modules)
    ]


def test_nodes_share_the_module_that_contains_them_all():
    assert common_module(nodes("m.layers.0.mlp", "m.layers.0.mlp.up", "")) == "m.layers.0.mlp"
    assert common_module(nodes("m.layers.1.mlp", "m.layers.10.mlp")) == "m.layers"
    assert common_module(nodes("a", "b")) == ""
    assert common_module([]) == ""
