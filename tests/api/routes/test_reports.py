"""Evaluation reports over HTTP: those of the folder, and nothing else of it."""

from pathlib import Path

import pytest

from hashseek.api.settings import Settings
from hashseek.retrieval.errors import BadConfig
from support.service import assert_problem, serving


def test_the_reports_of_a_folder_are_listed_and_shown(indexed, tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    for name in ("b/evaluation-best", "a & ü", "none", "\udcff"):
        (folder / name).mkdir(parents=True)
    for name in ("b/evaluation-best", "a & ü", "\udcff", ""):
        (folder / name / "report.html").write_text(f"<p>Report {name or 'of all'}", errors="replace")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "report.html").write_text("secret")
    (folder / "none" / "config.json").write_text("{}")
    monkeypatch.chdir(folder)
    for place in (folder, folder / "b" / "..", Path()):
        with serving(indexed, read_only=True, reports=place) as client:
            found = client.get("/v1/reports").json()["reports"]
            assert [one["name"] for one in found] == ["runs", "runs/a & ü", "runs/b/evaluation-best"]
            pages = [client.get(one["url"]) for one in found]
            assert [page.text for page in pages] == [
                "<p>Report of all",
                "<p>Report a & ü",
                "<p>Report b/evaluation-best",
            ]
            for page in pages:
                assert page.headers["content-type"].startswith("text/html")
                assert "default-src 'none'" in page.headers["content-security-policy"]
            for name in ("none", "runs/none/config.json", "secret", "..%2Fsecret", "runs/../secret", "%00", ""):
                answer = client.get(f"/v1/reports/{name}", follow_redirects=False)
                assert answer.status_code in (307, 404), name
    with serving(indexed, read_only=True) as client:
        assert client.get("/v1/reports").json() == {"reports": []}
        assert_problem(client.get("/v1/reports/runs"), 404, "UnknownReport", "runs")
    with pytest.raises(BadConfig):
        Settings(collection=indexed, reports=tmp_path / "missing").check()
