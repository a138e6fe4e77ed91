"""Live inputs of the modes that run a draft model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from graphkit.buffers.accepted import check_counts, host_rows
from graphkit.buffers.inputs import Inputs, StepInputs
from graphkit.buffers.layout import MODEL_DTYPE, Axis, Pad, Rows, declare
from graphkit.errors import InputError


@dataclass(kw_only=True, eq=False)
class DraftInputs(Inputs):
    """Candidates after each request's last token, from which its draft tree grows.

    ``seq_lens`` counts the tokens in the draft model's cache: the committed ones and, for
    STANDALONE, the bonus token. ``positions`` has the rows of the first step:
    ``seq_lens`` once per branch. Of ``out_cache_loc`` [B, K, S], branch k of step s writes
    [:, k, s]; the request's row of the request pool holds the same slots from ``seq_lens`` on.

    Shapes:
        req_pool_indices: [B] int64. seq_lens: [B] int32.
        topk_p: [B, K] float32. topk_index: [B, K] int64.
        hidden_states: [B, H] in the model's dtype; left out by STANDALONE.
        positions: [B * K] int64. out_cache_loc: [B * K * S] int64.
        mrope_positions: [3, B * K] int64.

    Attributes:
        input_ids: [B * K] int64; set for each step's forward, which also sees ``positions``,
            ``out_cache_loc`` and ``hidden_states`` of that step, one row per branch.
        custom_mask: [B, K, K * S] bool; set for each step of a tree: which draft slots, counted
            from ``seq_lens`` on, each branch sees.
    """

    counted_by: ClassVar[tuple[str, ...]] = ("input_ids", "positions")
    width_is_fixed: ClassVar[bool] = True

    input_ids: Rows = None
    out_cache_loc: Rows = declare(
        Axis.TOKEN,
        torch.int64,
        "KV slot that each branch writes at each step; slot 0 is the dummy",
        row=("S",),
        flat=True,
    )
    topk_p: Rows = declare(
        Axis.REQUEST,
        torch.float32,
        "probabilities of the first candidates; a chain does not depend on them",
        row=("K",),
        optional_read=True,
    )
    topk_index: Rows = declare(
        Axis.REQUEST, torch.int64, "token ids of the first candidates", row=("K",)
    )
    hidden_states: Rows = declare(
        Axis.REQUEST,
        MODEL_DTYPE,
        "the draft model's hidden state that made the candidates",
        row=("H",),
        by_address=True,
    )
    mrope_positions: Rows = declare(
        Axis.TOKEN, torch.int64, "temporal, height and width positions", lead=3, optional=True
    )
    custom_mask: torch.Tensor | None = None


@dataclass(kw_only=True, eq=False)
class DraftExtendInputs(Inputs):
    """Tokens that the draft model catches up on after a verify.

    ``seq_lens`` includes the rows of this step. v1 packs the accepted tokens of each request, so T
    is the sum of ``num_accepted_tokens``. v2 has all W rows of every request.

    Shapes:
        req_pool_indices: [B] int64. seq_lens, extend_seq_lens: [B] int32.
        num_accepted_drafts, num_accepted_tokens: [B] int32; see ``AcceptedCounts``.
        input_ids, positions, out_cache_loc: [T] int64.
        hidden_states: [T, D] in the model's dtype, D = ``spec_hidden_size``; left out by
            STANDALONE. mrope_positions: [3, T] int64.
    """

    extend_seq_lens: Rows = declare(
        Axis.REQUEST,
        torch.int32,
        "rows of each request in this batch",
        pad=Pad.WIDTH,
        optional_read=True,
    )
    num_accepted_drafts: Rows = declare(
        Axis.REQUEST,
        torch.int32,
        "draft tokens that passed verification, bonus excluded",
        optional_read=True,
    )
    num_accepted_tokens: Rows = declare(
        Axis.REQUEST, torch.int32, "accepted tokens, bonus included", pad=1, optional_read=True
    )
    hidden_states: Rows = declare(
        Axis.TOKEN,
        MODEL_DTYPE,
        "the target's hidden state of each row",
        row=("D",),
        by_address=True,
    )
    mrope_positions: Rows = declare(
        Axis.TOKEN, torch.int64, "temporal, height and width positions", lead=3, optional=True
    )

    @classmethod
    def row_counts(cls, batch: Any) -> NDArray[np.int64] | None:
        """Return the accepted tokens of each request; see ``StepInputs.row_counts``."""
        return _host_field(batch, "num_accepted_tokens")

    @classmethod
    def check(
        cls,
        batch: Any,
        tokens: int,
        width: int,
        ragged: bool,
        front_tokens: int | None = None,  # noqa: ARG003
    ) -> None:
        """Check that counts and lengths agree; see ``StepInputs.check``."""
        if _plainly_agree(batch, tokens, width, ragged):
            return
        accepted = _host_field(batch, "num_accepted_tokens")
        lengths = _host_field(batch, "extend_seq_lens")
        check_counts(getattr(batch, "num_accepted_drafts", None), accepted)
        _check_range("num_accepted_tokens", accepted, 1, width)
        _check_range("extend_seq_lens", lengths, 1, width)
        if not ragged or accepted is None:
            return
        if int(accepted.sum()) != tokens:
            raise InputError(
                f"num_accepted_tokens sums to {int(accepted.sum())}, but the batch has "
                f"{tokens} rows. Pack the accepted tokens of each request.",
                field="num_accepted_tokens",
            )
        if lengths is not None and not np.array_equal(lengths, accepted):
            raise InputError(
                f"extend_seq_lens is {lengths.tolist()}, but the rows of each request are its "
                f"num_accepted_tokens {accepted.tolist()}. Pass the same numbers.",
                field="extend_seq_lens",
            )

    def last_rows(self) -> torch.Tensor:
        """Return the row of each request's last accepted token, int64 [B]. May be captured.

        Rows are packed in v1. In v2 they are ``tokens_per_request`` apart, and the result is
        select_index: i * width + num_accepted_tokens - 1.
        """
        tokens: torch.Tensor = self.num_accepted_tokens.long()
        if self.width is not None:
            return tokens.cumsum(0) - 1
        starts = torch.arange(self.batch_size, device=tokens.device) * self.tokens_per_request
        return starts + tokens - 1


@dataclass(kw_only=True, eq=False)
class MultiLayerDraftExtendInputs(DraftExtendInputs):
    """``DraftExtendInputs`` of v2 for a chain of draft layers over one window per request.

    Shapes:
        select_index: [B] int64. temperatures: [B] float32.
    """

    select_index: Rows = declare(
        Axis.REQUEST, torch.int64, "flat row of each request's last accepted token"
    )
    temperatures: Rows = declare(
        Axis.REQUEST,
        torch.float32,
        "what each request's logits are divided by before top-k",
        pad=1,
        optional=True,
    )

    def last_rows(self) -> torch.Tensor:
        """Return ``select_index``, int64 [B]."""
        rows: torch.Tensor = self.select_index
        return rows

    @classmethod
    def check(
        cls, batch: Any, tokens: int, width: int, ragged: bool, front_tokens: int | None = None
    ) -> None:
        """Check that requests select their last accepted rows; see ``StepInputs.check``."""
        super().check(batch, tokens, width, ragged, front_tokens)
        select = _host_field(batch, "select_index")
        if select is None or select.ndim != 1:
            return  # the writer of the field checks its shape
        owner = np.arange(len(select))
        if ragged:
            return  # the rows are packed
        if not np.array_equal(select // width, owner):
            raise InputError(
                f"select_index is {select.tolist()}, but request i has rows i * {width} to "
                f"i * {width} + {width - 1}. Pass i * width + num_accepted_tokens - 1.",
                field="select_index",
            )
        accepted = _host_field(batch, "num_accepted_tokens")
        if front_tokens is None or accepted is None or select.shape != accepted.shape:
            return
        last = owner * width + front_tokens + accepted - 1
        if not np.array_equal(select, last):
            raise InputError(
                f"select_index is {select.tolist()}, but num_accepted_tokens {accepted.tolist()} "
                f"end in rows {last.tolist()}. Pass these rows.",
                field="select_index",
            )


@dataclass(kw_only=True, eq=False)
class DraftContextInputs(StepInputs):
    """Tokens whose hidden states become keys and values of a DFLASH draft model.

    After a verify these are all W rows of every request; those behind the accepted ones are
    overwritten by later steps before a row sees them. In a prefill they are the tokens of a prompt.

    Shapes:
        req_pool_indices: [B] int64. positions, out_cache_loc: [T] int64.
        hidden_states: [T, D] in the model's dtype, D = ``spec_hidden_size``.
    """

    req_pool_indices: Rows = declare(
        Axis.REQUEST,
        torch.int64,
        "row of the request in the request pool; row 0 is the dummy",
        optional_read=True,
    )
    positions: Rows = declare(Axis.TOKEN, torch.int64, "position of each token in its request")
    out_cache_loc: Rows = declare(
        Axis.TOKEN, torch.int64, "KV slot that each token writes; slot 0 is the dummy"
    )
    hidden_states: Rows = declare(
        Axis.TOKEN,
        MODEL_DTYPE,
        "the target's hidden state of each token",
        row=("D",),
        by_address=True,
    )


def _plainly_agree(batch: Any, tokens: int, width: int, ragged: bool) -> bool:
    """Return whether int32 arrays agree, in the few microseconds that a replay has.

    If not, the caller checks them in detail and reports the error.
    """
    drafts, accepted, lengths = (
        getattr(batch, name, None)
        for name in ("num_accepted_drafts", "num_accepted_tokens", "extend_seq_lens")
    )
    if not (
        type(drafts) is type(accepted) is type(lengths) is np.ndarray
        and drafts.dtype == accepted.dtype == lengths.dtype == np.int32
        and drafts.size > 0
        and drafts.shape == lengths.shape
        and accepted.tobytes() == (drafts + 1).tobytes()
    ):
        return False
    # As unsigned numbers, so that none is negative.
    most = drafts.view(np.uint32)
    if ragged:
        if accepted.tobytes() != lengths.tobytes() or np.add.reduce(accepted, axis=None) != tokens:
            return False
    else:
        most = np.maximum(most, (lengths - 1).view(np.uint32))
    return bool(np.maximum.reduce(most, axis=None) < width)


def _host_field(batch: Any, name: str) -> NDArray[np.int64] | None:
    return host_rows(getattr(batch, name, None))


def _check_range(name: str, rows: NDArray[np.int64] | None, least: int, most: int) -> None:
    if rows is not None and rows.size and not least <= rows.min() <= rows.max() <= most:
        raise InputError(
            f"{name} ranges from {rows.min()} to {rows.max()}, but a request has {least} to {most} "
            "rows.",
            field=name,
        )
