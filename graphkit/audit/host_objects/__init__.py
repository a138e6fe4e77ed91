"""Objects of the host that a forward can reach: its numbers, its weights and other tensors.

``reachable_objects`` walks them, ``containers`` reads and sets the values of each, ``host_numbers``
selects the numbers that the code of the forward reads, and ``frozen_values`` compares captures with
different numbers.
"""

from graphkit.audit.host_objects.forward_objects import ForwardObjects

__all__ = ["ForwardObjects"]
