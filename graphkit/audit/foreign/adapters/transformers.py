"""Continuous batching of transformers; signatures read in 5.23 and 5.24.

A graph is compared with an eager step on the batch at hand, so that numbers that the key lacks show
in the shadow. transformers has no plug-ins: the audit plugs this in at the first capture, so that
the graph of that capture is not registered. Call ``plug_in`` before to register it, too.
"""

from __future__ import annotations

import sys
from typing import Any

from graphkit.audit.foreign.adapters import check_signature, plugged_in, wrap
from graphkit.audit.foreign.registration import register

_PARAMETERS = ("self", "forward_fn", "compute_stream", "args")
_MODULE = "transformers.generation.continuous_batching.model_runner"


def plug_in_if_imported() -> None:
    """Plug in if the program has imported continuous batching."""
    if _MODULE in sys.modules:
        plug_in()


@plugged_in
def plug_in() -> None:
    """Register the graphs of continuous batching from now on."""
    from transformers.generation.continuous_batching import model_runner

    runner: Any = model_runner.ModelRunner
    check_signature(runner._capture_graph, _PARAMETERS, "transformers")
    check_signature(runner.compute_batch, ("self", "model", "batch_data"), "transformers")
    wrap(runner, "compute_batch", _compute_batch)
    wrap(runner, "_capture_graph", _capture_graph)


def _compute_batch(original: Any, self: Any, model: Any, batch_data: Any) -> Any:
    self._graphkit_batch = batch_data
    return original(self, model, batch_data)


def _capture_graph(original: Any, self: Any, forward_fn: Any, stream: Any, *args: Any) -> Any:
    result = original(self, forward_fn, stream, *args)
    inputs = self.inputs_and_outputs
    model, batch_data, carry_over_ids, previous_ids, output_ids = args

    def body() -> Any:
        batch = getattr(self, "_graphkit_batch", batch_data)
        forward_fn(model, batch, carry_over_ids, previous_ids, output_ids)
        return output_ids.clone()

    register(inputs.get_graph(), name=_name(inputs), body=body, outputs=output_ids)
    return result


def _name(inputs: Any) -> str:
    """Return a name with the key of the graph that was captured last; pairs of inputs have none."""
    key = getattr(inputs, "_get_graph_key", lambda: "")()
    return f"continuous batching {key}".rstrip()
