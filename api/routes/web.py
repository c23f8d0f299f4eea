"""The search page. All its files are served from here, none from another host."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

FOLDER = Path(__file__).parent.parent / "web"
POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; style-src 'self'; script-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)

FRESH = {"Cache-Control": "no-cache"}  # check for changes: modules of two versions must not be mixed

router = APIRouter(include_in_schema=False)


@router.get("/")
def index() -> FileResponse:
    """The search page."""
    return FileResponse(FOLDER / "index.html", headers={"Content-Security-Policy": POLICY, **FRESH})


class PageFiles(StaticFiles):
    """The scripts and styles of the page."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """The file, or 304 for a browser that has it."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(FRESH)
        return response
