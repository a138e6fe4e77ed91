"""SGLang: a plug-in of the group ``sglang.srt.plugins``; signatures read in 0.5.23.

``FullCudaGraphBackend.capture_one`` gets the whole step as a function, which may run again. The
runner's ``buffer_registry`` lists every static input with its axis and pads.
"""

from __future__ import annotations

from typing import Any

from graphkit.audit.foreign.adapters import check_signature, plugged_in
from graphkit.audit.foreign.registration import register

_BACKEND = "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend"
_ANYTHING = ("keep_pad", "foreach_copy")
"""Policies of slots whose pad rows keep what they hold, because nothing reads them."""


@plugged_in
def plug_in() -> None:
    """Register the graphs of all runners from now on."""
    from importlib import import_module

    backend: Any = import_module(_BACKEND).FullCudaGraphBackend
    registry: Any = import_module("sglang.srt.plugins.hook_registry")
    check_signature(backend.capture_one, ("self", "shape_key", "forward_fn"), "SGLang")
    check_signature(registry.HookRegistry.register, ("target", "hook", "hook_type"), "SGLang")
    registry.HookRegistry.register(
        f"{_BACKEND}.FullCudaGraphBackend.capture_one", _capture_one, registry.HookType.AROUND
    )


def _capture_one(
    original: Any, self: Any, shape_key: Any, forward_fn: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(self, shape_key, forward_fn, *args, **kwargs)
    runner = self._cuda_graph_runner
    inputs = _inputs(runner, shape_key.size)
    parts = (shape_key.size, shape_key.variant_label, shape_key.attention_variant)
    label = " ".join(str(part) for part in parts if part is not None)
    register(
        self._graphs[shape_key],
        name=f"{type(runner).__name__} {label}",
        body=forward_fn,
        inputs=inputs,
        outputs=self._outputs[shape_key],
        live_rows=(lambda: runner.raw_bs) if inputs else None,
        key=lambda: getattr(runner, "_replay_graph_key", None) or shape_key,
    )
    return result


def _inputs(runner: Any, batch_size: int) -> dict[str, tuple[Any, int, Any]]:
    """Return the static inputs of a graph of requests; none for graphs of tokens."""
    registry = getattr(runner, "buffer_registry", None)
    if registry is None or getattr(runner, "ragged_verify_mode", False):
        return {}
    width = int(getattr(runner, "captured_req_width", 1))
    rows = {"bs": batch_size, "tokens": batch_size * width}
    inputs = {}
    for name in registry.slot_names():
        slot = registry.get_slot(name)
        is_sliced = slot.axis in rows and getattr(slot, "slice_fn", None) is None
        if not slot.enabled or not is_sliced or str(getattr(slot, "device", None)) == "cpu":
            continue
        policy = slot.padding_policy.value
        pad = None if policy in _ANYTHING else 0 if policy == "zero" else slot.pad_value
        inputs[name] = (slot.buffer[: rows[slot.axis]], 0, pad)
    return inputs
