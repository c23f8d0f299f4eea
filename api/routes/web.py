"""The search page. All its files are served from here, none from another host."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

FOLDER = Path(__file__).parent.parent / "web"
POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; style-src 'self'; script-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)

router = APIRouter(include_in_schema=False)


@router.get("/")
def index() -> FileResponse:
    """The search page."""
    return FileResponse(FOLDER / "index.html", headers={"Content-Security-Policy": POLICY})
