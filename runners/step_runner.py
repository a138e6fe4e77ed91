"""STEP: any step with declared inputs and outputs that fits no other mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from graphkit.buffers import Axis, StepInputs, fields_of
from graphkit.config import BufferSizes, require_int
from graphkit.errors import ConfigError, short_repr
from graphkit.runners.outputs import Output
from graphkit.runners.runner import InputsT, OutputT, Runner
from graphkit.runners.settings import RunnerOptions, show_options
from graphkit.spec import ForwardMode, SpecConfig


class StepRunner(Runner[InputsT, OutputT]):
    """Captures a step whose inputs and outputs the caller declares.

    For draft heads and auxiliary models that fit none of the forward modes. Capture, replay,
    staging, audits, inspection and the equivalence kit work as for any mode::

        @dataclass(kw_only=True, eq=False)
        class HeadInputs(gk.StepInputs):
            hidden_states: gk.Rows = gk.declare(
                gk.Axis.REQUEST, gk.MODEL_DTYPE, "last hidden state", row=("H",), by_address=True
            )

        @dataclass(kw_only=True, eq=False)
        class HeadOutput(gk.Output):
            logits: torch.Tensor = gk.declare_output(gk.Axis.REQUEST, row=(4, "V"))

        runner = gk.StepRunner(head, inputs=HeadInputs, output=HeadOutput, sizes=sizes)

    See ``Runner`` for further arguments.

    Args:
        forward: Takes ``inputs``, padded to a captured size, and returns ``output``.
        inputs: Subclass of ``StepInputs`` that declares the fields, at least one of them per
            request. See ``graphkit.declare`` for the letters of row shapes.
        output: Subclass of ``Output`` that declares the fields with ``graphkit.declare_output``.
        sizes: Sizes of the buffers.
        spec: Gives the letters K and S a value, and W without ``tokens_per_request``.
        tokens_per_request: Rows per request of fields per token (W); 1 without ``spec``.

    Raises:
        ConfigError: ``inputs`` or ``output`` is not such a class, or a setting contradicts another.
        DeviceError: The device does not exist.
    """

    mode = ForwardMode.STEP
    inputs_type = StepInputs
    output_type = Output

    @show_options(Runner.__init__)
    def __init__(
        self,
        forward: Callable[[InputsT], OutputT],
        *,
        inputs: type[InputsT],
        output: type[OutputT],
        sizes: BufferSizes,
        spec: SpecConfig | None = None,
        tokens_per_request: int | None = None,
        **options: Unpack[RunnerOptions],
    ) -> None:
        _check_subclass("inputs", inputs, StepInputs)
        _check_subclass("output", output, Output)
        if not any(field.axis is Axis.REQUEST for field in fields_of(inputs)):
            raise ConfigError(
                f"{inputs.__name__} declares no field per request, so a batch has no size. Declare "
                "at least one with Axis.REQUEST.",
                field="inputs",
            )
        if tokens_per_request is not None:
            require_int("StepRunner", "tokens_per_request", tokens_per_request)
        self._width = tokens_per_request
        self.inputs_type, self.output_type = inputs, output
        super().__init__(
            forward,
            spec=spec or SpecConfig("NONE", num_steps=0, topk=1, num_draft_tokens=1),
            sizes=sizes,
            **options,
        )

    @classmethod
    def width(cls, spec: SpecConfig) -> int:
        """Return the rows per request without ``tokens_per_request``."""
        return spec.num_draft_tokens

    @classmethod
    def constructor_kwargs(cls, inputs: type | None, output: type | None) -> dict[str, Any]:
        """See ``Runner.constructor_kwargs``."""
        return {"inputs": inputs, "output": output}

    def _rows_per_request(self, spec: SpecConfig) -> int:
        return self._width or self.width(spec)


def _check_subclass(argument: str, value: object, base: type) -> None:
    if not (isinstance(value, type) and issubclass(value, base)):
        raise ConfigError(
            f"{argument} must be a subclass of graphkit.{base.__name__}, got {short_repr(value)}.",
            field=argument,
        )
