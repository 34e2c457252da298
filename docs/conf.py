"""The documentation site: `scripts/docs` builds it, without network; warnings are errors."""

import re

import torchelastic

project = "torchelastic"
copyright = "the torchelastic authors"
version = release = torchelastic.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
highlight_language = "none"

templates_path = ["_templates"]
html_title = "torchelastic"
html_show_sourcelink = False
html_theme = "pytorch_sphinx_theme2"
html_theme_options = {
    "logo": {"text": "torchelastic"},
    "header_links_before_dropdown": 8,
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "article_header_end": [],
    "article_footer_items": [],
    "secondary_sidebar_items": ["page-toc"],
    "use_edit_page_button": False,
    "llm_disabled": True,
}


def _as_rst(app, what, name, obj, options, lines):  # noqa: ANN001, ANN202
    """Our docstrings are plain text: code in single backticks, or indented after a blank line."""
    if what == "module":
        lines.clear()  # its overview of the source
    for at in reversed(range(2, len(lines))):
        if lines[at][:4] == "    " and not lines[at - 1] and lines[at - 2][:1].strip():
            lines[at:at] = ["::", ""]
    lines[:] = [re.sub(r"(?<![`\w:])`([^`]+)`(?!`)", r"``\1``", line) for line in lines]


def setup(app):  # noqa: ANN001, ANN201
    app.connect("autodoc-process-docstring", _as_rst)
