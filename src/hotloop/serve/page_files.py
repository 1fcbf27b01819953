"""The files of the page at /, which lets people try the models: HTML, styles and scripts in the folder `page`.

Its scripts ask the same addresses as any other client; a Content-Security-Policy keeps everything else out.
"""

from importlib.resources import files
from pathlib import Path

from starlette.responses import Response

from hotloop.serve.refusal import NotFound
from hotloop.serve.tensors import shorten

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# Nothing from elsewhere, nothing inline. `data:` is the icon, which is none.
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


def serve_page_file(name: str) -> Response:
    """A file of the page; NotFound for any other name."""
    folder = files("hotloop.serve").joinpath("page")
    file = next((each for each in folder.iterdir() if each.name == name), None)
    kind = KINDS.get(Path(name).suffix)
    if file is None or kind is None:
        raise NotFound(f"the page has no file {shorten(name)}")
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(file.read_bytes(), media_type=kind, headers={**headers, "Cache-Control": "no-cache"})
