"""Pictures of the use of memory over the nodes of a graph."""

from __future__ import annotations

from graphkit.views.pages.memory import live_counts, node_uses


def test_an_address_is_drawn_from_its_first_to_its_last_use():
    assert node_uses({2, 7}, 10).draw(10) == "  █░░░░█"
    assert node_uses({9}, 10).draw(10) == " " * 9 + "█"
    assert node_uses({2, 7}, 10).draw(5) == " █░█"


def test_counts_are_those_of_addresses_between_first_and_last_use():
    uses = [node_uses(nodes, 6) for nodes in ({0, 3}, {1}, {1, 5})]
    live = live_counts(uses, 6)
    assert live.counts == (1, 3, 2, 2, 1, 1)
    assert live.draw(6) == "▃█▆▆▃▃"


def test_a_cell_has_the_largest_count_of_its_nodes():
    live = live_counts([node_uses({0}, 4), node_uses({0}, 4), node_uses({3}, 4)], 4)
    assert live.counts == (2, 0, 0, 1)
    assert live.draw(2) == "█▄"


def test_nothing_in_use_is_an_empty_picture():
    assert live_counts([], 4).draw(8) == ""
