"""Links of a page that lead out of `docs/` to a folder or a page of the repository: on the site, GitHub's view of it.

Other files out of `docs/` are downloads by MyST's own rule, which works offline; a folder cannot be one, and a page
such as README.md is no document of the site.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = Path(__file__).resolve().parents[2]


class RepositoryLinks(SphinxPostTransform):
    """Runs before MyST looks for the targets (priority 9), which would warn of these."""

    default_priority = 8

    def run(self, **arguments: Any) -> None:
        """Replaces what leads out of the folder of pages; what leads nowhere stays, and MyST warns of it."""
        source = Path(self.env.srcdir)
        for node in list(self.document.findall(pending_xref)):
            if node["reftype"] != "myst":
                continue
            # A page is named without its suffix, from the root of the site; a folder from the page that names it.
            page = Path(f"{source / node['reftarget']}.md").resolve()
            folder = (source / self.env.docname).parent.joinpath(node["reftarget"]).resolve()
            if node["refdomain"] == "doc" and page.is_file() and source not in page.parents:
                kind, target = "blob", page
            elif folder.is_dir() and ROOT in folder.parents:
                kind, target = "tree", folder
            else:
                continue
            base = self.config.html_theme_options["repository_url"]
            anchor = f"#{node['reftargetid']}" if node.get("reftargetid") else ""
            address = f"{base}/{kind}/main/{target.relative_to(ROOT)}{anchor}"
            node.replace_self(nodes.reference("", "", *node.children, refuri=address, internal=False))


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_post_transform(RepositoryLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
