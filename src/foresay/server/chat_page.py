"""Files of the chat page, and the headers that forbid everything from elsewhere.

Owns which files are served. Does not know the API that the page uses.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

_SCRIPTS = (
    *("vendor/marked.umd.js", "dom.js", "code.js", "markdown.js", "panel.js"),
    *("chat.js", "talks.js", "page.js"),
)
PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}": (name, "text/javascript") for name in _SCRIPTS},
}
"""Path of each file -> its name in the folder `page`, and its media type."""
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",  # the icon of a tab
    "connect-src": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "require-trusted-types-for": "'script'",  # text that is assigned as HTML raises an error
    "trusted-types": "'none'",
}
_SECURITY_HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_routes(app: FastAPI) -> None:
    """Serve the chat page at / from its files."""
    folder = files("foresay.server") / "page"

    def add(path: str, name: str, kind: str) -> None:
        text = (folder / name).read_text(encoding="utf-8")

        @app.get(path, include_in_schema=False)
        async def file() -> Response:
            return Response(text, media_type=f"{kind}; charset=utf-8", headers=_SECURITY_HEADERS)

    for path, (name, kind) in PAGE_FILES.items():
        add(path, name, kind)

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204, headers={"Cache-Control": "max-age=86400"})
