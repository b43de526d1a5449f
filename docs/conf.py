"""How the documentation is built: MyST pages, furo, and one generated page for each transformation."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from transformation_pages import write_pages

from refold import __version__

project = "Refold"
author = "The Refold team"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"Refold {__version__}"
exclude_patterns = ["_build"]
autodoc_typehints = "description"


def setup(app: object) -> None:
    write_pages(Path(__file__).parent / "transformations")
