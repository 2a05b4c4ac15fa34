"""Settings of the documentation: ``make docs`` builds it, warnings being errors, and runs its examples."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpyro_orthgp  # noqa: E402

project = "numpyro_orthgp"
author = "The numpyro_orthgp authors"
copyright = "the numpyro_orthgp authors"
version = release = numpyro_orthgp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

# Links into NumPyro's and JAX's pages need the network, which a build does without unless it is asked.
if os.environ.get("DOCS_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "numpyro": ("https://num.pyro.ai/en/stable", None),
        "arviz": ("https://python.arviz.org/en/stable", None),
    }

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"numpyro_orthgp {release}"
html_static_path = ["_static"]
html_show_sphinx = False
