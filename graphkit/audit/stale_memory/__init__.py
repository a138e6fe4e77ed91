"""Search for memory of the graph pool that a replay reads before it writes it."""
