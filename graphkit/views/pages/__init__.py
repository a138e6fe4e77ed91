"""Records as pages: what each view shows, and where its keys lead."""

from graphkit.views.pages.first import first_pages

__all__ = ["first_pages"]
