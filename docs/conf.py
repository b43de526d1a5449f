"""How the documentation is built: MyST pages, furo, and pages generated from the code itself."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from api_page import write_api_page  # noqa: E402
from command_page import write_command_page  # noqa: E402
from measured_page import write_measured_page  # noqa: E402
from transformation_pages import write_pages  # noqa: E402

from refold import __version__  # noqa: E402

project = "Refold"
author = "The Refold team"
release = version = __version__
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"Refold {__version__}"
html_static_path = ["_static"]
html_show_copyright = False
exclude_patterns = ["_build", "generated", "decisions/README.md"]
# Signatures are shown as they are written; nothing is looked up on the network.
python_use_unqualified_type_names = True
add_module_names = False


def setup(app: object) -> None:
    """Generated pages are written before Sphinx looks for documents."""
    (HERE / "_static").mkdir(exist_ok=True)
    write_pages(HERE / "transformations")
    write_api_page(HERE / "generated" / "api.md")
    write_command_page(HERE / "generated" / "commands.md")
    write_measured_page(HERE / "generated" / "measured.md")
