"""How Sphinx makes the site: `make site` writes it to `runs/site`, warnings are errors."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "site"))

project = "Drivetrain"
project_copyright = "the Drivetrain authors"
release = tomllib.loads((HERE.parent / "core/pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "generated"]
exclude_patterns = ["site"]

# Headings are link targets on GitHub, so they are here.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"Drivetrain {release}"
html_static_path = ["site/static"]
html_favicon = "site/static/favicon.svg"
html_css_files = ["drivetrain.css"]
html_js_files = ["copy.js", "layout.js", "wrap.js"]
pygments_dark_style = "github-dark"
# Sphinx opens it from where the command is typed, unlike its other paths.
html_search_scorer = str(HERE / "site/scorer.js")
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "navigation_with_keys": True,
    # Until the distributions are published; one text for all pages, so it holds no link of a page.
    "announcement": 'Not on a package index yet. Where a page says <code>pip install "drivetrain[NAME]"</code>, type '
    "<code>pip install --editable core --editable plugins/NAME</code> in a clone "
    "(Install says what some of them need beside it).",
}
