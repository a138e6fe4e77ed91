"""Comparison of replays with the same step without a graph, and bisection of a wrong graph."""
