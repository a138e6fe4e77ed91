"""Records as rich renderables: the same for a terminal, a pipe and a file."""

from graphkit.views.audit import audit_view
from graphkit.views.bench import bench_view
from graphkit.views.capture import capture_view
from graphkit.views.diff import diff_view
from graphkit.views.doctor import Fact, doctor_view
from graphkit.views.exports import FORMATS, Export
from graphkit.views.generate import generate_view, visible
from graphkit.views.inspect import inspect_view, node_view
from graphkit.views.module_tree import Branch, module_tree
from graphkit.views.svg import svg_of

__all__ = [
    "FORMATS",
    "Branch",
    "Export",
    "Fact",
    "audit_view",
    "bench_view",
    "capture_view",
    "diff_view",
    "doctor_view",
    "generate_view",
    "inspect_view",
    "module_tree",
    "node_view",
    "svg_of",
    "visible",
]
