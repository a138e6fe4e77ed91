"""vLLM: a plug-in of the group ``vllm.general_plugins``; signatures read in 0.33.0.

``CudaGraphManager`` keeps a graph for each descriptor of a batch. ``dispatch`` gets what the batch
is; the adapter compares it with the descriptor whose graph then runs. The body of a capture gets
dummy inputs, so that it is not registered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from graphkit.audit.foreign.adapters import check_signature, plugged_in, wrap
from graphkit.audit.foreign.registration import register

_BATCH = ("num_reqs", "num_tokens", "uniform_token_count", "num_active_loras", "max_query_len")


@plugged_in
def plug_in() -> None:
    """Register the full graphs of all managers from now on."""
    from importlib import import_module

    manager: Any = import_module("vllm.v1.worker.gpu.cudagraph_utils").CudaGraphManager
    check_signature(manager.capture, ("self", "create_forward_fn"), "vLLM")
    check_signature(manager.dispatch, ("self", *_BATCH), "vLLM")
    check_signature(manager.run_fullgraph, ("self", "desc"), "vLLM")
    wrap(manager, "dispatch", _dispatch)
    wrap(manager, "capture", _capture)


def _dispatch(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    self._graphkit_batch = dict(zip(_BATCH, args, strict=False)) | kwargs
    return original(self, *args, **kwargs)


def _capture(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    before = set(self.graphs)
    result = original(self, *args, **kwargs)
    self._graphkit_batch = None
    for desc, graph in self.graphs.items():
        if desc in before:
            continue
        requests = "" if desc.num_reqs is None else f", {desc.num_reqs} requests"
        register(
            graph,
            name=f"{type(self).__name__} {desc.num_tokens} tokens{requests}",
            key=partial(_batch_of, desc, self),
        )
    return result


def _batch_of(desc: Any, manager: Any) -> str:
    """Return what of the last batch a graph is not for, or what the graph is for."""
    batch, fits = manager._graphkit_batch, str(desc)
    if batch is None:
        return fits
    uniform, longest = desc.uniform_token_count, desc.max_query_len
    if batch["num_tokens"] > desc.num_tokens:
        return f"{batch['num_tokens']} tokens"
    if desc.num_reqs is not None and batch["num_reqs"] > desc.num_reqs:
        return f"{batch['num_reqs']} requests"
    if uniform is not None and batch["uniform_token_count"] != uniform:
        return f"{batch['uniform_token_count']} tokens per request"
    most = batch.get("max_query_len")
    if longest is not None and (most is None or most > longest):
        return f"{most} tokens in a request"
    return fits
