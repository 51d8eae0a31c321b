"""Sphinx builds the documentation from these pages and the package's docstrings: ``make docs``."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "zenflow-compile"
author = "the zenflow-compile contributors"
copyright = f"2026, {author}"
release = version = installed_version("zenflow-compile")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = "zenflow-compile"
templates_path: list[str] = []
exclude_patterns = ["_build"]

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style"), ("Keys", "params_style")]
napoleon_use_rtype = False

nitpicky = True
# Types of internals that public objects refer to.
_INTERNAL = ("explanation.GraphRecord", "planning.plan.Plan", "runtime.engine.Engine")
nitpick_ignore = [("py:class", f"zenflow_compile.{name}") for name in _INTERNAL]
# The build needs no network: names of other packages are shown without links.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|rich|lightning|transformers|accelerate|collections|os|pathlib|types|typing)\..*"),
]
