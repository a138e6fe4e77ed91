"""Search for host values that a graph captured."""
