"""Ops for draft trees, accepted tokens and KV slots.

Each is a function that calls one op of the dispatcher, ``torch.ops.graphkit.NAME``: a torch
reference on the CPU, Triton kernels of ``graphkit.ops.kernels`` on CUDA. None waits for the device;
all may be captured and compiled. Read ``registration`` first, then ``rows`` as an example of an op.

The core, ``spec``, ``graphs``, ``buffers`` and ``runners``, imports these files alone:

- ``registration``, ``argument_rules``, ``docstrings``, ``inference``: what every op is made of.
- ``kernel_requests``: the pass that compiles kernels in parallel.
- ``refresh``: fills and pads the inputs of a captured graph.
- ``rows``, ``step_rows``, ``packed``: copy rows, and compute rows of a forward.
- ``logits``, ``tree``, ``tree_growth``: the choice of draft tokens within a captured draft.

Layers of models and attention: ``decoder``, ``heads``, ``linear``, ``quantized_*``, ``kv_cache``,
``paged_*``, ``attention_layout``. All others belong to steps: verification, sampling, the state of
requests and loops on the device.
"""

from graphkit.lazy_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)
