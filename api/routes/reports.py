"""Reports of evaluations and training runs: a list of them, and their pages."""

from pathlib import Path
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse

from hashseek.api.messages.problems import UnknownReport
from hashseek.api.messages.schemas import Report, ReportList
from hashseek.api.routes.dependencies import CollectionsDep, NoQueryDep
from hashseek.api.settings import Settings

router = APIRouter(prefix="/v1/reports", tags=["reports"], dependencies=[NoQueryDep])

# The page of a report embeds its style and pictures, and has no scripts.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; frame-ancestors 'none'"


@router.get("")
def list_reports(collections: CollectionsDep) -> ReportList:
    """The reports of evaluations and training runs in the folder of `--reports`, by name."""
    names = _pages(collections.settings)
    return ReportList(reports=[Report(name=name, url=f"/v1/reports/{quote(name)}") for name in names])


@router.get("/{name:path}", response_class=HTMLResponse)
def get_report(name: str, collections: CollectionsDep) -> FileResponse:
    """The page of a report."""
    pages = _pages(collections.settings)
    if name not in pages:
        raise UnknownReport(f"there is no report {name[:80]!r}: /v1/reports lists them")
    return FileResponse(pages[name], headers={"Content-Security-Policy": _POLICY})


def _pages(settings: Settings) -> dict[str, Path]:
    """The pages of the reports by name: the path of a report's folder, starting with the name of the reports folder."""
    if settings.reports is None:
        return {}
    folder = settings.reports.resolve()
    pages = {page.parent.relative_to(folder.parent).as_posix(): page for page in folder.rglob("report.html")}
    return {name: pages[name] for name in sorted(pages) if name.isprintable()}
