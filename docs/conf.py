"""How Sphinx builds these pages: Markdown by MyST, the reference out of the docstrings.

`sphinx-build -W --keep-going -n docs docs/_build`
"""

from __future__ import annotations

import inspect
from typing import Any

import fx2relax

project = "fx2relax"
release = version = fx2relax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"fx2relax {release}"
html_show_copyright = html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
# `name` in a docstring: a link where this reference has it.
default_role = "py:obj"
# All that is in this reference has to be found; what is PyTorch's, TVM's or Python's is elsewhere.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!fx2relax\.).*"),
    (r"py:.*", r"fx2relax\.(late\..*|registry\.Function)"),
]


def _without_constructor(
    app: Any, what: str, name: str, value: Any, options: Any, signature: Any, returns: Any
) -> tuple[str, None] | None:
    """Show no signature of a class that says who makes it."""
    made = what in ("class", "exception") and "Made by" in (inspect.getdoc(value) or "")
    return ("", None) if made else None


def setup(app: Any) -> None:
    """Connect to Sphinx."""
    app.connect("autodoc-process-signature", _without_constructor)
