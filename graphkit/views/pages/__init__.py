"""Pages of records with graphs: what each one shows, and the pages that its keys lead to."""

from graphkit.views.pages.graph import graph_page
from graphkit.views.pages.initial import first_page, initial_pages
from graphkit.views.pages.kernels import kernels_page
from graphkit.views.pages.memory import buffers_page, memory_page
from graphkit.views.pages.node import node_page
from graphkit.views.pages.page_model import Column, GraphGroup, Link, Page, Row, Siblings
from graphkit.views.pages.timeline import timeline_page

__all__ = [
    "Column",
    "GraphGroup",
    "Link",
    "Page",
    "Row",
    "Siblings",
    "buffers_page",
    "first_page",
    "graph_page",
    "initial_pages",
    "kernels_page",
    "memory_page",
    "node_page",
    "timeline_page",
]
