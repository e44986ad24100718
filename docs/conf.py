"""How the documentation is built: `make docs`. Its pages run no experiment; figures are drawn from `results/`."""

import importlib
import pkgutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE), str(HERE.parent)]
import wellnormed  # noqa: E402 (of this folder)

project = "wellnormed"
author = "The wellnormed authors"
copyright = author
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "markdown_docstrings",
    "mathml",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_gallery.gen_gallery",
]
root_doc = "index"
exclude_patterns = ["_build", "gallery", "templates"]
templates_path = ["templates"]
nitpicky = False  # names in signatures of torch and jaxtyping have no page here


def guests(room: str) -> list[str]:
    """The names that a room shows and that have their place in another room, which lists them too."""
    named = {name: getattr(importlib.import_module(room), name) for name in dir(importlib.import_module(room))}
    homes = {name: ".".join(str(getattr(value, "__module__", room)).split(".")[:2]) for name, value in named.items()}
    return [name for name, home in homes.items() if home in ROOMS and home != room and name in dir(sys.modules[home])]


ROOMS = [f"wellnormed.{module.name}" for module in pkgutil.iter_modules(wellnormed.__path__) if module.ispkg]
for room in ROOMS:
    importlib.import_module(room)
autosummary_context = {"guests": {room: guests(room) for room in ROOMS}}
autosummary_generate = True
autosummary_imported_members = True  # a room is a list of names from its private files
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False
myst_heading_anchors = 3
myst_fence_as_directive = {"math"}  # ```math, which GitHub draws, too

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "reset_modules": ("matplotlib",),
    "abort_on_example_error": True,
}

html_math_renderer = "mathml"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = "wellnormed"
html_show_sphinx = False
html_copy_source = False
