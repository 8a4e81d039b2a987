"""How Sphinx builds the site: `make docs`, into build/docs. Every warning is an error there: dead links, missing
anchors, pages in no table of contents."""

import megajax

project = "megajax"
author = "the authors of megajax"
release = megajax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns: list[str] = []
html_theme = "furo"
html_title = f"megajax {release}"

myst_heading_anchors = 4  # GitHub's, which links between pages name

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_use_ivar = True  # "Attributes:" beside dataclass fields would name each twice
