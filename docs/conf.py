"""Settings of the documentation: ``make docs`` builds it without a network."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "extensions")]

from graphkit import __version__ as release  # noqa: E402

project = "graphkit"
author = "The graphkit authors"
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "api_reference",
    "command_reference",
    "docstring_sections",
    "exported_pages",
    "measured_tables",
]
exclude_patterns = ["build"]
smartquotes = False  # the text has options such as --out

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True

toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "graphkit"
html_static_path = ["static"]
html_css_files = ["graphkit.css"]
html_show_sourcelink = False
html_sidebars = {"changelog": []}
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
