"""Sphinx: the guides, and a reference made from docstrings. Build it with `make docs`."""

from __future__ import annotations

import shardwright

project = "shardwright"
version = release = shardwright.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "index"
html_theme = "alabaster"
html_theme_options = {"page_width": "1040px", "fixed_sidebar": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
myst_heading_anchors = 4
