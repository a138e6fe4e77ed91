"""Records as rich renderables: the same for a terminal, a pipe and a file."""

from graphkit.views.bench import bench_view
from graphkit.views.capture import capture_view
from graphkit.views.doctor import Finding, doctor_view
from graphkit.views.generate import generate_view, visible
from graphkit.views.svg import svg_of

__all__ = [
    "Finding",
    "bench_view",
    "capture_view",
    "doctor_view",
    "generate_view",
    "svg_of",
    "visible",
]
