"""How Sphinx builds the site: `make docs`, into build/docs. Every warning is an error there: dead links, missing
anchors, pages in no table of contents."""

import megajax

project = "megajax"
author = "the authors of megajax"
copyright = "the authors of megajax, Apache License 2.0"
release = megajax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns: list[str] = []
html_theme = "furo"
html_title = f"megajax {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

default_role = "code"  # docstrings write names between single backticks; in code the hyphens of flags stay
smartquotes_action = "D"  # dashes only, which Sphinx writes as -- in lists of parameters
highlight_language = "bash"  # blocks without a language are commands
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"

myst_heading_anchors = 4  # GitHub's, which links between pages name

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_use_ivar = True  # "Attributes:" beside dataclass fields would name each twice
