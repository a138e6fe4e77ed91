"""Records as rich renderables for terminals, pipes and files, and as pages for the screen."""

from graphkit.views.audit import audit_view, findings_view
from graphkit.views.bench import bench_view
from graphkit.views.capture import capture_view
from graphkit.views.diff_text import diff_view
from graphkit.views.doctor import Fact, doctor_view
from graphkit.views.exports import FORMATS, Export
from graphkit.views.formatting import visible
from graphkit.views.generate import generate_view
from graphkit.views.inspect import inspect_view
from graphkit.views.memory import memory_view

__all__ = [
    "FORMATS",
    "Export",
    "Fact",
    "audit_view",
    "bench_view",
    "capture_view",
    "diff_view",
    "doctor_view",
    "findings_view",
    "generate_view",
    "inspect_view",
    "memory_view",
    "visible",
]
