"""Settings of the documentation: ``make docs`` builds it, warnings being errors, and runs the examples of docstrings."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "docs"))

import notebooks  # noqa: E402
from docutils.nodes import literal_block  # noqa: E402
from jax.typing import ArrayLike  # noqa: E402
from sphinx.util.typing import stringify_annotation  # noqa: E402

import numpyro_orthgp  # noqa: E402

project = "numpyro_orthgp"
author = "The numpyro_orthgp authors"
copyright = "the numpyro_orthgp authors"
version = release = numpyro_orthgp.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_design",
]
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "guide/corners.md"]  # the latter is part of guide/numpyro.md
default_role = "code"  # docstrings write `noise_scale` where they mean code
nitpicky = True  # a reference to a name that is not there is an error
# Other projects' pages are not there without the network.
nitpick_ignore_regex = [
    ("py:.*", r"(jax|jaxlib|numpy|np|numpyro|optax|arviz|matplotlib|collections|typing|pathlib|dist|random)\..*"),
    (
        "py:class",
        r"Array|ArrayLike|Axes|Component|Grouping|Integrator|PRNGKey|Status|Term|Transform",
    ),  # aliases, and parts of others
    (
        "py:class",
        r"numpyro_orthgp\.(kernels\.components\.Component|kernels\.random_features\.(Factor|Term)|kernels\.terms\.Term|functions\.sites\.Names|math\.grouped\.Grouping)",
    ),
    (
        "py:class",
        r"numpyro_orthgp\.(math\.compiled\._F|functions\.mean_only\.MeanShift|tabular\.(labels\.Labels|atoms\.Atoms))",
    ),
    (
        "py:class",
        r"numpyro_orthgp\.(foreign\.KnownTables|inducing\.tasks\.Chosen|training\.(result\.Fitted|lazy_rows\.LazyRows))",
    ),
]

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
autodoc_inherit_docstrings = False  # what a subclass does not say anew is said once, on the page of its base
autodoc_typehints = "signature"
autodoc_default_options = {
    "members": True,
    "special-members": "__call__, __getitem__, __add__, __mul__, __matmul__",
}
autodoc_preserve_defaults = True
maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"numpyro_orthgp {release}"
# Formulas are drawn by MathJax, whose one file comes from an installed package: pages ask no other site for anything.
mathjax = importlib.util.find_spec("sphinx-mathjax-offline")
if mathjax is None or mathjax.origin is None:
    raise ImportError("The site needs the package sphinx-mathjax-offline: pip install '.[docs]'.")
mathjax_path = "tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}}  # the menu would load more files
html_static_path = ["_static", str(Path(mathjax.origin).parent / "static" / "mathjax" / mathjax_path)]
html_css_files = ["custom.css"]
html_show_sphinx = False


def name_array_like(app, what, name, obj, options, signature, returns):
    """In signatures the name of ``ArrayLike``, not the eight types that it stands for."""
    types = stringify_annotation(ArrayLike, "smart")
    return tuple(text and text.replace(types, "ArrayLike") for text in (signature, returns))


def mark_narrow(app, doctree, docname):
    """Mark output that fits a phone at the size of code: custom.css makes the rest smaller there."""
    for block in doctree.findall(literal_block):
        if max(map(len, block.astext().splitlines()), default=0) <= 44:
            block["classes"].append("narrow")


def setup(app):
    app.connect("builder-inited", lambda app: notebooks.offer())
    app.connect("doctree-resolved", mark_narrow)
    app.connect("autodoc-process-signature", name_array_like)
