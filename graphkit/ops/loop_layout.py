"""Layout of what a device loop keeps: reports, its control words and its output ring.

A *report* has one int32 row per request of a step: ``Report``, then the new tokens, up to P, and
after them as many words with the log-probability of each token, the bits of float32. Those of
requests without log-probabilities, and behind the new tokens, are ``NO_LOGPROB``. The report of a
prefill has these words only if a request of it has log-probabilities.

The ring is one int64 tensor in memory that host and device both access: its counters never
overflow, as int32 would after days of short steps. The host writes the words
of ``RingWord``; the device writes the entries::

    [ stop, read, 14 unused | entry 0 | entry 1 | ... ]
    entry = [ EntryWord, 9 unused | one report row per request of the largest size ]

The entry of step n, counted from 0 over all launches, is ``n % entries``. Its ``SEQUENCE`` is n + 1
and is written last.
"""

from __future__ import annotations

from enum import IntEnum

RING_WORDS = 16
"""Words before entry 0."""
ENTRY_WORDS = 16
"""Words before an entry's report."""
NO_LOGPROB = -1
"""Word of a report that has no log-probability: as float32, a NaN that no operation returns."""


class Report(IntEnum):
    """First columns of a report's row. The new tokens follow."""

    ROW = 0
    """Row of the request in the request pool; 0 if the request had ended before the step."""
    ACCEPTED = 1
    """Tokens that the step accepted, those behind the request's end included."""
    NEW = 2
    """New tokens of the request."""
    END = 3
    """A ``RequestEnd``."""
    DRAFTS = 4
    """Drafts that the step verified for the request; -1 in the report of a prefill."""
    TOKENS = 5


class RequestEnd(IntEnum):
    """Why a request ended in a step."""

    RUNNING = 0
    STOP = 1
    """A stop token."""
    LENGTH = 2
    """No tokens remain."""


class RingWord(IntEnum):
    """Words that the host writes."""

    STOP = 0
    """Number of the last launch to end: it and all earlier ones end after the step that runs."""
    READ = 1
    """Entries that the host has read."""


class EntryWord(IntEnum):
    """Words before an entry's report."""

    SEQUENCE = 0
    BATCH_SIZE = 1
    """Size at which the step ran: rows of the report."""
    LOOP_END = 2
    """A ``LoopEnd``."""
    LAUNCH = 3
    """Number of the launch, from 1."""
    LENGTH = 4
    """Index of the draft length of the step."""
    PLAIN_TIME = 5
    """Time of plain decoding for the tokens of all steps before, see ``Ledger``, in
    thousandths of its unit; 0 with one draft length."""
    STEP_TIME = 6
    """Time of these steps."""


class LoopEnd(IntEnum):
    """Why a loop ended after a step."""

    RUNNING = 0
    STEPS = 1
    """The launch's number of steps is done."""
    REQUEST = 2
    """A watched request ended."""
    IDLE = 3
    """All requests have ended."""
    STOPPED = 4
    """The host stopped the launch."""
    RING_FULL = 5
    """The host has not read the oldest entry yet."""


class EndSignal(IntEnum):
    """Words of ``end_signals``: why a host asks for the end of a loop."""

    STOP = 0
    RING_FULL = 1


END_SIGNAL_WORDS = 4
"""Words of ``end_signals``, 16 bytes: collectives move so many at once. The last two are unused."""


class Control(IntEnum):
    """Words of a loop's control on the device, int64."""

    AGAIN = 0
    """1 if another step runs."""
    BODY = 1
    """Index of the captured size of the next step; with several draft lengths, of its body."""
    STEPS_LEFT = 2
    WRITTEN = 3
    """Entries written, over all launches."""
    LAUNCH = 4
    """Number of the launch, from 1."""


class Ledger(IntEnum):
    """Words of a ledger, float64: what drafts have gained and cost."""

    CREDIT = 0
    """Steps of plain decoding that drafts may still lose, in times of a plain step."""
    PLAIN_TIME = 1
    """Time that plain decoding takes for the tokens of all steps so far."""
    STEP_TIME = 2
    """Time of all steps so far."""
    CLOCK = 3
    """Clock at the end of the last step, in nanoseconds; 0 if no step was timed before."""
