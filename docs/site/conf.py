"""The Sphinx configuration for the output of `docs.site.assemble`; `python -m docs.site` uses it.

Pages load nothing from another server.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

project = "policyloss"
author = "The policyloss authors"
copyright = author  # noqa: A001  # the name that Sphinx reads
release = re.findall(
    r'^__version__ = "(.+)"$', (ROOT / "src/policyloss/__init__.py").read_text(), re.MULTILINE
)[0]
extensions = ["myst_parser", "sphinx_design", "sphinx_copybutton"]
exclude_patterns = ["files/**"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = f"policyloss {release}"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_js_files = [(name, {"defer": "defer"}) for name in ("choose.js", "versions-menu.js")]
templates_path = [str(HERE / "templates")]
html_copy_source = False
html_show_sphinx = False
html_search_scorer = str(HERE / "scorer.js")
html_sidebars: dict[str, list[str]] = {"index": []}
html_theme_options = {
    "logo": {"text": "policyloss"},
    "navbar_align": "left",
    "navbar_persistent": ["search-button-field"],
    "navbar_end": ["versions", "theme-switcher"],
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc", "markdown-twin"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
