"""What the runner of a forward mode declares about the mode."""

from __future__ import annotations

from typing import Any, ClassVar

from graphkit.buffers import AttentionBackend, InputBuffers, StepInputs
from graphkit.config import BufferSizes
from graphkit.runners.sample_rows import SampleRows, sample_fields
from graphkit.runners.step import Step
from graphkit.spec import ForwardMode, SpecConfig


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

        Args:
            spec: How the algorithm drafts and verifies.
            rows: The requests of the batch.
        """
        width = cls.width(spec) if rows.width is None else rows.width
        return sample_fields(rows, width, ragged=cls.ragged, appends=cls.appends_rows)

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
