"""The documentation's settings for Sphinx; `make docs` builds it into `site/`."""

import os
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

import corral

project = "Corral"
author = "The Corral authors"
version = release = corral.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_static"]

# Markdown. Links to anchors are checked, as all warnings are errors.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

# The reference of classes. Docstrings are in Markdown's spelling of code.
default_role = "code"
autodoc_default_options = {"members": True, "inherited-members": False}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Reductions", "params_style")]
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# The theme. The site of a repository has links to it: `make docs REPOSITORY=https://host/owner/name`.
repository = os.environ.get("REPOSITORY", "").rstrip("/")
html_theme = "pydata_sphinx_theme"
html_title = "Corral"
html_static_path = ["_static"]
html_css_files = ["corral.css"]
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "Corral"},
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "icon_links": [{"name": "Repository", "url": repository, "icon": "fa-brands fa-git-alt"}] if repository else [],
    "use_edit_page_button": bool(repository),
    "show_prev_next": True,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 5,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
if repository:
    html_context = {"edit_page_url_template": f"{repository}/edit/main/docs/{{{{ file_name }}}}"}
html_copy_source = False
project_copyright = "the Corral authors, Apache-2.0"
copybutton_prompt_text = r"^\$ "
copybutton_prompt_is_regexp = True


def link_pages(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Make links of the names of pages in a docstring, such as docs/replay.md."""
    lines[:] = [re.sub(r"`?docs/([\w/-]+)\.md`?", r":doc:`/\1`", line) for line in lines]


def link_back(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let pages of source code link to names that are documented at another path than the first of their file."""
    if not page.startswith("_modules/"):
        return
    names = app.env.domains.python_domain.objects

    def anchor(found: re.Match[str]) -> str:
        tail = "." + found[1].removeprefix("corral.")
        known = found[1] if found[1] in names else next((name for name in names if name.endswith(tail)), found[1])
        return f'#{known}"'

    context["body"] = re.sub(r'#(corral\.[\w.]+)"', anchor, context["body"])


def setup(app: Sphinx) -> None:
    """Change what no setting of Sphinx changes."""
    app.connect("html-page-context", link_back)
    app.connect("autodoc-process-docstring", link_pages)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
