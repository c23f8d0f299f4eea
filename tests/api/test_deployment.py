"""The deployment files in docs/deploy: they can be read, and name only files, settings and commands that exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hashseek.api.settings import options
from support.paths import ROOT
from support.pictures import png
from support.service import hits, search, serving

DEPLOY = ROOT / "docs" / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_mounts_files_that_exist_and_sets_variables_that_are_read():
    services = COMPOSE["services"].values()
    for volume in (volume for service in services for volume in service.get("volumes", [])):
        source = volume.split(":")[0]
        if source.startswith("./"):
            assert (DEPLOY / source).exists(), volume
        elif not source.startswith("$"):
            assert source in COMPOSE["volumes"], volume
    assert (DEPLOY / COMPOSE["services"]["hashseek"]["build"]["context"]).resolve() == ROOT
    needed = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text()))
    assert needed == set(re.findall(r"^(\w+)=", (DEPLOY / ".env.example").read_text(), re.M))
    known = {parameter.annotation.__metadata__[0].envvar for parameter in options()} | {"HASHSEEK_CACHE"}
    assert {*COMPOSE["services"]["hashseek"]["environment"]} <= known
    assert set(re.findall(r"(HASHSEEK_\w+)=/", (ROOT / "Dockerfile").read_text())) <= known
    built_with = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.M))
    assert {*COMPOSE["services"]["hashseek"]["build"]["args"]} <= built_with


def test_prometheus_and_grafana_find_each_other():
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    [job] = prometheus["scrape_configs"]
    [secret] = COMPOSE["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    [target] = job["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert name in COMPOSE["services"]["hashseek"]["environment"]["HASHSEEK_ALLOWED_HOSTS"].split()
    assert f"HASHSEEK_PORT={port}" in (ROOT / "Dockerfile").read_text()
    assert all((DEPLOY / file).exists() for file in prometheus["rule_files"])
    [source] = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    dashboard = yaml.safe_load((DEPLOY / "grafana/dashboards/hashseek.json").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}


def test_dashboard_and_alerts_show_metrics_that_the_service_has(indexed):
    with serving(indexed, read_only=True) as client:  # the newest service of the process has its figures there
        hits(search(client, png(1)))
        assert client.get("/v1/images/99").status_code == 404
        kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", client.get("/metrics").text, re.M))
    histograms = {
        name + end for name, kind in kinds.items() if kind == "histogram" for end in ("_bucket", "_sum", "_count")
    }
    shown = yaml.safe_load((DEPLOY / "grafana/dashboards/hashseek.json").read_text())["panels"]
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    text = " ".join(
        [target["expr"] for panel in shown for target in panel["targets"]] + [rule["expr"] for rule in rules]
    )
    names = set(re.findall(r"\b(?:hashseek|process)_\w+", text))
    assert len(names) > 8
    assert names <= histograms | {*kinds}


def test_the_image_for_processors_installs_faiss_without_cuda(tmp_path):
    [command] = re.findall(r"(sed -i .+? pyproject\.toml); fi", (ROOT / "Dockerfile").read_text())
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    found = re.findall(r'^ *"(faiss.*)"', (tmp_path / "pyproject.toml").read_text(), re.M)
    assert [re.fullmatch(r"faiss-cpu>=[\d.]+", line) is not None for line in found] == [True]


def test_the_settings_for_systemd_are_read(hashseek):
    unit = (DEPLOY / "hashseek.service").read_text()
    [_, *arguments] = re.search(r"^ExecStart=(.*)$", unit, re.M)[1].split()
    arguments = [argument.replace("/etc/hashseek", str(DEPLOY)) for argument in arguments]
    code, printed, err = hashseek(*arguments, "--print-config")
    assert (code, err) == (0, "")
    assert 'keys = "/var/lib/hashseek/keys.toml"' in printed


def test_systemd_accepts_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = Path(sys.executable).parent / "hashseek"
    unit = (DEPLOY / "hashseek.service").read_text().replace("/opt/hashseek/bin/hashseek", str(command))
    (tmp_path / "hashseek.service").write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "hashseek.service"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
