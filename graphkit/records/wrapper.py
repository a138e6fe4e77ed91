"""Result of the comparison of a wrapper with the model that it wraps."""

from __future__ import annotations

from dataclasses import dataclass

from graphkit.records.record import Count, Real


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperDifference:
    """The first row whose logits differ between a wrapper and its model by more than rounding.

    Attributes:
        mode: Name of the forward mode.
        batch: The batch of the row, such as ``the prompt of request 0``.
        row: Index of the row in the batch.
        request: Index of the request that the row belongs to.
        position: Position of the row in its request.
        difference: Largest absolute difference of a logit of the row.
        ulps: That difference in units in the last place of ``dtype``.
        dtype: Dtype of these units, which the step computes in.
        expected_token: Token with the largest logit of the model.
        token: Token with the largest logit of the wrapper.
        module: Path of the first module whose inputs agree and whose output, or a call in it,
            differs; empty if it is not known.
        source: Line that calls a module of which the first difference is an argument or the output.
        first: The first difference in that module; empty if it is not known.
        advice: What to look at.
    """

    mode: str
    batch: str
    row: Count
    request: Count
    position: Count
    difference: Real
    ulps: Real
    dtype: str
    expected_token: Count
    token: Count
    module: str = ""
    source: str = ""
    first: str = ""
    advice: str = ""

    @property
    def text(self) -> str:
        """The difference as two or three sentences, without the mode."""
        tokens = f"Both predict token {self.token}."
        if self.token != self.expected_token:
            tokens = f"The wrapper predicts token {self.token}, the model {self.expected_token}."
        text = (
            f"row {self.row} of {self.batch} (position {self.position} of request {self.request}) "
            f"has logits that differ from those of the model by up to {self.difference:.3g} "
            f"({self.ulps:.3g} ulp of {self.dtype}). {tokens}"
        )
        return f"{text} {self.first}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperRecord:
    """Result of the comparison of a target with its model.

    Attributes:
        rows: Number of rows that were compared; the comparison ends with the batch that differs.
        prompt_length: Tokens of the longest prompt.
        largest_difference: Largest absolute difference of a logit, allowed or not.
        not_reached: Windows and chunks of the model that no row of the comparison leaves, such as
            ``sliding_window 4096``.
        difference: The first row that differs; ``None`` if all agree within rounding.
        skipped: Reason why nothing was compared, or an empty string.
    """

    rows: Count = 0
    prompt_length: Count = 0
    largest_difference: Real = 0.0
    not_reached: tuple[str, ...] = ()
    difference: WrapperDifference | None = None
    skipped: str = ""
