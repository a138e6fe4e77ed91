"""Runs of one step with and without its graph, and their comparison.

A replay is right if it agrees with the same padded step without a graph, bit for bit, and if that
agrees with the step on the live rows alone, up to rounding. Captures, audits, the shadow watch and
the kit for tests all check this here.

``EqualStateRuns`` runs one batch in these ways, each time from the same state, and ``compare_runs``
compares them; ``first_node`` finds where two of them begin to differ. ``engine_step`` and
``request_runs`` do the same for the whole step of an engine. ``capture_target`` checks every replay
of a target. ``estimate_target`` predicts the memory of its graphs.
"""
