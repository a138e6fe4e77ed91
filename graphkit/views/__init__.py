"""Records as rich renderables for terminals, pipes and files, and as pages for the screen."""

from graphkit.views.exports import FORMATS, Export, diff_view
from graphkit.views.formatting import visible
from graphkit.views.text.audit import audit_view, findings_view
from graphkit.views.text.bench import bench_view
from graphkit.views.text.capture import capture_view, memory_view
from graphkit.views.text.generate import generate_view
from graphkit.views.text.inspect import inspect_view

__all__ = [
    "FORMATS",
    "Export",
    "audit_view",
    "bench_view",
    "capture_view",
    "diff_view",
    "findings_view",
    "generate_view",
    "inspect_view",
    "memory_view",
    "visible",
]
