"""Choice of the batch sizes to capture, from logs of live sizes and measured costs."""

from graphkit.plan.size_plan import plan_sizes
from graphkit.plan.traffic import read_traffic

__all__ = ["plan_sizes", "read_traffic"]
