"""How Sphinx builds the documentation site (`make docs`): the pages of this folder, as GitHub shows them, and the API.

Links between pages are those of Markdown files, so that they work on GitHub too. Pages of `tutorials/` are notebooks
and are executed by each build. What is built needs nothing from the network when it is looked at.
"""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
# Notebooks are other processes: no downloads, a cache of compiled programs like any other run's, quiet bars.
os.environ.setdefault("HOTLOOP_OFFLINE", "1")
os.environ["PYTHONPATH"] = os.pathsep.join((sys.path[0], os.environ.get("PYTHONPATH", "")))
IPYTHON = Path(__file__).parents[1] / "build" / "ipython"
(IPYTHON / "profile_default" / "startup").mkdir(parents=True, exist_ok=True)
shutil.copy(Path(__file__).parent / "_ext" / "bash_cells.py", IPYTHON / "profile_default" / "startup")
(IPYTHON / "profile_default" / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 'ERROR'\n")
os.environ["IPYTHONDIR"] = str(IPYTHON)
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

from hotloop.version import VERSION

project = "hotloop"
author = "the hotloop authors"
copyright = "the hotloop authors, MIT licence"
version = release = VERSION

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "field_comments",
    "repository_links",
    "short_signatures",
]
exclude_patterns = ["_build", "_ext"]
nitpicky = True

# Markdown: anchors as GitHub makes them; tutorials alone are notebooks, and one that fails fails the build.
myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence", "deflist"]
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_show_tb = True  # a failure is a warning, and so an error of the build
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
default_role = "code"  # docstrings have one backtick, as Markdown does
python_use_unqualified_type_names = True
# Other packages' names (their inventories are on the network), and what type checkers alone see.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!hotloop).*"),
    (r"py:.*", r"hotloop\.(cli|engine|families|layers|mcmc|options|data|serve)\..*"),
]

html_theme = "sphinx_book_theme"
html_title = "hotloop"
highlight_language = "none"  # of blocks that name none: commands
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
# Pages of wide tables, or of a wide drawing, have the whole width.
WIDE = (
    "speed",
    "history",
    "tour",
    *(f"migration/{name}" for name in ("cnn", "vcd", "recommender", "kernels", "estimator")),
)
html_theme_options = {
    "repository_url": "https://github.com/hotloop/hotloop",
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_download_button": False,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "navbar_persistent": [],
    "secondary_sidebar_items": {"**": ["page-toc"]} | {page: [] for page in WIDE},
}
