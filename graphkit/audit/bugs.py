"""Classes of bugs. One cause has one name, whichever audit finds it."""

from __future__ import annotations

from enum import Enum

BAKED_VALUE = "baked value"
FREED_MEMORY = "freed memory"
NONDETERMINISTIC_CAPTURE = "capture is not deterministic"
REPLACED_BUFFER = "replaced buffer"
SIDE_OUTPUT = "side output"
STALE_POOL_MEMORY = "stale pool memory"
UNDECLARED_STATE = "undeclared state"
WARM_UP_LEAK = "warm-up leak"


class Bug(Enum):
    """A class of bug that runs of a step on different batches show. The value is the advice."""

    LEAKING_PAD_ROW = (
        "Compute every row from that row alone: no mean, maximum, norm or scale over the batch. "
        "Mask scores, not products: 0 * NaN is NaN."
    )
    DEPENDENCE_ON_THE_BATCH_SIZE = (
        "Let a row compute the same at every batch size: no branch on the number of rows, and no "
        "mean or count over all of them. If kernels of another size round more than expected, pass "
        "a tolerance."
    )
    METADATA_OF_ANOTHER_SIZE = (
        "Compute it from the inputs in every forward, or keep one for each batch size."
    )
    LAZY_CACHE = "Compute it from the inputs in every forward, or cache only constants."
    WRITE_OUTSIDE_LIVE_SLOTS = (
        "Write only to the slots of inputs.out_cache_loc, which is 0 in pad rows. Set page_size in "
        "BufferSizes if the tensor is split into pages, as [pages, slots of a page, ...]."
    )
    STALE_ROWS_OF_A_LARGER_BATCH = (
        "A value outlives its replay. Fill the tail of your own buffers, or declare them as input "
        "fields, which every replay pads."
    )
    ROWS_DEPEND_ON_BATCH_ORDER = "Compute a row from its inputs, not from its index in the batch."
    SIZES_INTERFERE = (
        "Graphs of two sizes share memory that one of them reads before it writes, such as a "
        "workspace or a counter. Initialise it inside the graph."
    )
    NONDETERMINISTIC_STEP = (
        "Declare everything that a step changes as mutable_state, and use deterministic kernels. "
        "Replays of a nondeterministic step cannot be checked."
    )
    NONDETERMINISTIC_ROUNDING = (
        "Nothing to change if outputs need not be equal bit for bit: the step adds in changing "
        "order, as atomic additions do. Use deterministic kernels if they must."
    )
    ROUNDING_DEPENDS_ON_OTHER_ROWS = (
        "Nothing to change if outputs need not be equal bit for bit: kernels that split their work "
        "by the rows of the batch, such as grouped matrix products, round differently. Use a "
        "batch-invariant kernel if they must."
    )

    @property
    def severity(self) -> str:
        """``error``, or ``note`` for a difference within the rounding of the step."""
        notes = Bug.NONDETERMINISTIC_ROUNDING, Bug.ROUNDING_DEPENDS_ON_OTHER_ROWS
        return "note" if self in notes else "error"

    @property
    def within_rounding(self) -> Bug:
        """The class of a difference that rounding explains."""
        if self is Bug.NONDETERMINISTIC_STEP:
            return Bug.NONDETERMINISTIC_ROUNDING
        return Bug.ROUNDING_DEPENDS_ON_OTHER_ROWS

    @property
    def kind(self) -> str:
        """Name of the class as text, such as ``leaking pad row``."""
        return self.name.lower().replace("_", " ")
