"""A small speculative decoding engine that drives the runners end to end.

A request passes through ``engine`` (queue, prefill, batch) and a generation, which runs the steps
of ``step`` and decides when the host waits for their tokens. ``request_memory`` holds its KV slots
meanwhile. Models attend through ``attention`` to the pools of ``kv``.
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
