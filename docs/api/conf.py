"""Sphinx: the guides, and a reference made from docstrings. `make docs` builds them."""

from __future__ import annotations

import shardwright

project = "shardwright"
version = release = shardwright.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
# The repository is the source, so that links between its pages are links of the site.
include_patterns = [
    "docs/**", "*.md", "**/README.md", "benchmarks/RESULTS.md", "policies/autodist/space.md",
]  # fmt: skip
exclude_patterns = [".*", "**/.*", "build", "tests", "*.egg-info"]
root_doc = "docs/api/index"
templates_path = ["templates"]
html_additional_pages = {"index": "to_the_root.html"}
html_theme = "alabaster"
html_theme_options = {"page_width": "1040px", "fixed_sidebar": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
myst_heading_anchors = 4
