"""What the runner of a forward mode declares about the mode, and the rows of its sample batches.

Suffixes: B requests, W rows per request, X slots or rows per request.
"""

# ruff: noqa: N803, N806 - shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from graphkit.buffers import AttentionBackend, InputBuffers, StepInputs
from graphkit.config import BufferSizes
from graphkit.runners.step import Step
from graphkit.spec import ForwardMode, SpecConfig

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Requests of a sample batch.

    Attributes:
        rows: Row of each request in the request pool, [B].
        committed: Committed tokens of each request, [B].
        accepted: Accepted tokens of each request, bonus token included, [B].
        slots: KV slot of each position of each row of the request pool, [rows, context].
        parents: Parent of each tree node, an earlier node, [B, W]; ``None`` for chains.
        num_front_tokens: Rows before the drafts that run again.
        width: Rows per request without these; ``None`` selects the mode's.
    """

    rows: Numbers
    committed: Numbers
    accepted: Numbers
    slots: Numbers
    parents: Numbers | None = None
    num_front_tokens: int = 0
    width: int | None = None

    def slots_after(self, count: int) -> Numbers:
        """Return the KV slots of the next positions of each request, [B, count]."""
        place_BX = self.committed[:, None] + np.arange(count)
        slots: Numbers = self.slots[self.rows[:, None], place_BX]
        return slots


def tree_masks(parents_BW: Numbers) -> tuple[NDArray[np.bool_], Numbers]:
    """Return mask [B, W, W] and depth [B, W] of trees. A node sees its ancestors and itself.

    Args:
        parents_BW: Parent of each node, an earlier node. Node 0 is the root.
    """
    requests, width = parents_BW.shape
    mask = np.zeros((requests, width, width), dtype=np.bool_)
    request = np.arange(requests)
    for node in range(width):
        if node:
            mask[:, node] = mask[request, parents_BW[:, node]]
        mask[:, node, node] = True
    return mask, mask.sum(2) - 1


class ModeDeclaration:
    """Base of ``Runner``: what the runner of a mode overrides, and the settings that this reads.

    Commands, audits and strategies read nothing else about a mode. ``mode``, ``inputs_type`` and
    ``output_type`` have no default.
    """

    mode: ClassVar[ForwardMode]
    """The forward mode."""
    inputs_type: type[StepInputs]
    """Class of the inputs."""
    output_type: type[Any]
    """Class of the output."""
    step_type: ClassVar[type[Step[Any]]] = Step
    """Operations around the forward."""
    attention_mode: ClassVar[ForwardMode | None] = None
    """Mode under which attention backends know this step; ``mode`` if ``None``."""
    appends_rows: ClassVar[bool] = True
    """Whether ``seq_lens`` leaves out the rows of this step."""
    ragged: ClassVar[bool] = False
    """Whether a request may have fewer rows than ``tokens_per_request``."""
    takes_layers: ClassVar[bool] = False
    """Whether ``forward`` is a sequence with one forward per draft step."""
    may_stay_eager: ClassVar[bool] = False
    """Whether an attention backend without support makes batches fall back instead of an error."""

    spec: SpecConfig
    """How the algorithm drafts and verifies."""
    sizes: BufferSizes
    """Sizes of the buffers."""
    attention: AttentionBackend | None
    """Backend that makes ``inputs.attention``, if any."""
    buffers: InputBuffers
    """Memory of the inputs."""
    tokens_per_request: int
    """Rows per request (W), num_tokens_per_bs in other engines."""
    num_front_tokens: int = 0
    """Rows before the drafts of each request that run again."""

    @property
    def label(self) -> str:
        """The mode's name, which differs from that of every other runner of a step."""
        return self.mode.name

    @classmethod
    def width(cls, spec: SpecConfig) -> int:
        """Return the rows per request."""
        return spec.tokens_per_request(cls.mode)

    @classmethod
    def slots_written(cls, spec: SpecConfig) -> int:
        """Return the KV slots that a step writes behind the committed tokens of a request."""
        return cls.width(spec)

    @classmethod
    def sample_fields(cls, spec: SpecConfig, rows: SampleRows) -> dict[str, Any]:
        """Return the fields of a sample batch that say where its rows are, as numpy arrays.

        These are all such fields of any mode. Token ids are not among them.
        """
        width = cls.width(spec) if rows.width is None else rows.width
        width += rows.num_front_tokens
        accepted_B, requests = rows.accepted, len(rows.rows)
        counts_B = accepted_B if cls.ragged else np.full_like(accepted_B, width)
        is_row_BW = np.arange(width) < counts_B[:, None]
        depth_BW = np.tile(np.arange(width), (requests, 1))
        fields: dict[str, NDArray[np.generic]] = {}
        if rows.parents is not None:
            fields["custom_mask"], depth_BW = tree_masks(rows.parents)
        positions = (rows.committed[:, None] + depth_BW)[is_row_BW]
        starts_B = np.arange(requests) * width
        return fields | {
            "req_pool_indices": rows.rows,
            "seq_lens": rows.committed + (0 if cls.appends_rows else counts_B),
            "positions": positions,
            "mrope_positions": np.tile(positions, (3, 1)),
            "out_cache_loc": rows.slots_after(width)[is_row_BW],
            "extend_seq_lens": counts_B,
            "num_accepted_drafts": accepted_B - 1,
            "num_accepted_tokens": accepted_B,
            "select_index": starts_B + rows.num_front_tokens + accepted_B - 1,
        }

    @classmethod
    def constructor_kwargs(cls, inputs: type | None, output: type | None) -> dict[str, Any]:  # noqa: ARG003
        """Return the arguments that pass a target's inputs and output classes to the runner."""
        return {"inputs_type": inputs}

    def implied_fields(self) -> tuple[str, ...]:
        """Return the optional fields that the settings imply."""
        return ()

    def unused_fields(self) -> tuple[str, ...]:
        """Return the fields that the settings make meaningless. They get no memory."""
        return ()

    def steps_ahead(self) -> int:
        """Return how many positions beyond those of its batch a step reaches at most."""
        return 0

    def _rows_per_request(self, spec: SpecConfig) -> int:
        return self.width(spec) + self.num_front_tokens

    def _check_spec(self, spec: SpecConfig) -> None:
        """Refuse settings that the mode cannot run.

        Raises:
            ConfigError: The mode cannot run with ``spec``.
        """
