"""What chooses the draft lengths of an engine, and how tests choose for it."""

from graphkit.ops.draft_length import MOST_CREDIT
from graphkit.ops.loop_layout import Ledger


def choices_of(engine):
    """Return what chooses the lengths of an engine's steps."""
    schedule = engine._batching.schedule
    return schedule._runner._loops.state.lengths if engine.generation == "v3" else schedule._lengths


def column_of_lengths(choices):
    """Return the index of the draft length of each variant that verifies all of its drafts."""
    last = {drafts: column for column, drafts in enumerate(choices.drafts[: choices.count])}
    return {column: length for length, column in enumerate(last.values())}


def force_variant(engine, column):
    """Let the next step, or launch, run one variant, by its column of the times."""
    choices = choices_of(engine)
    choices.times.fill_(1.0)
    choices.times[:, column] = 0.01
    choices.ledger[Ledger.CREDIT] = MOST_CREDIT


def force_lengths(engine, times):
    """Set the times of the lengths at every size; a plain step that catches up takes no longer.

    Steps that divide their rows take much longer.
    """
    choices = choices_of(engine)
    choices.times.fill_(100.0)
    for column in range(choices.times.shape[1]):
        length = column_of_lengths(choices).get(column, 0 if column == choices.count else None)
        if length is not None:
            choices.times[:, column] = times[length]
    choices.ledger[Ledger.CREDIT] = MOST_CREDIT
