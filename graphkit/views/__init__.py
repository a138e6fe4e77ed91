"""Records as rich renderables: the same for a terminal, a pipe and a file."""

from graphkit.views.capture import capture_view
from graphkit.views.doctor import Finding, doctor_view
from graphkit.views.svg import svg_of

__all__ = ["Finding", "capture_view", "doctor_view", "svg_of"]
