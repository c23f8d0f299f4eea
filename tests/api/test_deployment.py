"""The deployment files in docs/deploy: they can be read, and name only files, settings and commands that exist."""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
import yaml

from hashseek.api.keys import create
from hashseek.api.settings import options
from hashseek.indexing.milvus_uri import is_in_milvus, parse_uri
from hashseek.retrieval.files import cache_folder
from hashseek.retrieval.models.torchvision_weights import cached
from support.milvus_server import free_port
from support.paths import ROOT
from support.pictures import png
from support.service import hits, search, serving
from support.web import QuietHandler, answering

DEPLOY = ROOT / "docs" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
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
    needed = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text())) | {"COMPOSE_PROFILES"}
    assert COMPOSE["services"]["caddy"]["environment"].keys() == set(
        re.findall(r"\{\$(\w+)", (DEPLOY / "Caddyfile").read_text())
    )
    assert needed == set(re.findall(r"^(\w+)=", (DEPLOY / ".env.example").read_text(), re.M))
    known = {parameter.annotation.__metadata__[0].envvar for parameter in options()} | {"HASHSEEK_MILVUS_TOKEN"}
    assert {*COMPOSE["services"]["hashseek"]["environment"]} <= known
    assert set(re.findall(r"(HASHSEEK_\w+)=/", (ROOT / "Dockerfile").read_text())) <= known
    built_with = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.M))
    assert {*COMPOSE["services"]["hashseek"]["build"]["args"]} <= built_with


def test_compose_starts_a_milvus_server_only_for_a_collection_in_it():
    assert {name for name, service in COMPOSE["services"].items() if "profiles" in service} == {"milvus"}
    milvus, example = COMPOSE["services"]["milvus"], (DEPLOY / ".env.example").read_text()
    assert milvus["profiles"] == re.findall(r"COMPOSE_PROFILES=(\w+)", example)
    [place] = re.findall(r"milvus://\S+", example)
    assert parse_uri(place).host in COMPOSE["services"]
    tested = re.findall(r"milvus==(\S+)", (ROOT / "Makefile").read_text())
    assert milvus["image"].split(":v")[1:] == tested


def test_prometheus_and_grafana_find_each_other():
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    [job] = prometheus["scrape_configs"]
    [secret] = COMPOSE["services"]["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    [found] = job["dns_sd_configs"]
    assert {*found["names"]} <= {*COMPOSE["services"]}
    assert f"HASHSEEK_PORT={found['port']}" in (ROOT / "Dockerfile").read_text()
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


def test_the_image_keeps_caches_and_downloaded_weights_in_the_volume(monkeypatch):
    image = (ROOT / "Dockerfile").read_text()
    [volume], [cache] = re.findall(r"^VOLUME (\S+)$", image, re.M), re.findall(r"XDG_CACHE_HOME=(\S+)", image)
    for name in ("HASHSEEK_CACHE", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert all(path.is_relative_to(volume) for path in (cache_folder(), cached("weights.pth")))


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


def test_prometheus_accepts_the_configuration_and_the_alerts(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    shutil.copy(DEPLOY / "alerts.yml", tmp_path)
    (tmp_path / "key").touch()
    configuration = (DEPLOY / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(configuration.replace("/run/secrets/prometheus.key", "key"))
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "3 rules found" in done.stdout


@pytest.mark.skipif(shutil.which("caddy") is None, reason="caddy is not installed")
def test_caddy_sends_only_to_services_that_are_ready_and_never_waits_for_100_continue(tmp_path):
    status, asked = {}, []

    class Service(QuietHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Host"]))
            assert "Expect" not in self.headers
            self.send_response(status[self.server])
            self.send_header("Content-Length", "0")
            self.end_headers()

    port = free_port()
    config = (DEPLOY / "Caddyfile").read_text().replace("servers {", "admin off\n\tservers {", 1)
    config = config.replace("{$HASHSEEK_HOST_NAME} {", f"http://pictures.example:{port} {{", 1)
    (tmp_path / "Caddyfile").write_text(config)
    with answering(Service) as one, answering(Service) as other:
        upstreams = " ".join(f"localhost:{service.server_port}" for service in (one, other))
        own = {"HASHSEEK_HOST_NAME": "pictures.example", "HASHSEEK_UPSTREAMS": upstreams, "HOME": str(tmp_path)}
        status |= {one: 200, other: 503}
        command = ["caddy", "run", "--adapter", "caddyfile", "--config", tmp_path / "Caddyfile"]
        with subprocess.Popen(command, env={**os.environ, **own}, stderr=subprocess.DEVNULL) as caddy:
            try:
                url = f"http://127.0.0.1:{port}/v1/stats"
                headers = {"Host": "pictures.example", "Expect": "100-continue"}
                for ready in (one, other):
                    status |= {one: 503, other: 503, ready: 200}
                    answers = [0]
                    until = time.monotonic() + 60
                    while answers[-10:] != [200] * 10 and time.monotonic() < until:
                        time.sleep(0.2)
                        with suppress(httpx.HTTPError):
                            answers.append(httpx.get(url, headers=headers).status_code)
                    assert answers[-10:] == [200] * 10
            finally:
                caddy.terminate()
    # A container's name is none of those under which the service may be reached, but probes may use any.
    assert {host.partition(":")[0] for path, host in asked if path == "/healthz/ready"} == {"localhost"}


# ---------------------------------------------------------------- Kubernetes


def manifests(text):
    """The objects in manifests by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


MANIFESTS = manifests("\n---\n".join(file.read_text() for file in sorted(KUBERNETES.glob("*.yaml"))))
POD = MANIFESTS["Deployment"]["spec"]["template"]
[CONTAINER] = POD["spec"]["containers"]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("kind", sorted(MANIFESTS))
def test_kubernetes_accepts_the_manifests(kind, version):
    kubernetes_validate.validate(MANIFESTS[kind], version, strict=True)


def test_the_check_of_manifests_refuses_unknown_fields():
    wrong = deepcopy(MANIFESTS["Deployment"])
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_the_manifests_fit_together_and_the_image():
    image = (ROOT / "Dockerfile").read_text()
    spec, [port] = POD["spec"], CONTAINER["ports"]
    assert f"EXPOSE {port['containerPort']}\n" in image
    assert f"--uid {spec['securityContext']['runAsUser']} " in image
    assert spec["enableServiceLinks"] is False  # or the Service would set HASHSEEK_PORT to tcp://ADDRESS:PORT
    assert MANIFESTS["Service"]["spec"]["selector"].items() <= POD["metadata"]["labels"].items()
    assert MANIFESTS["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    budget = MANIFESTS["PodDisruptionBudget"]["spec"]
    assert budget["selector"]["matchLabels"] == POD["metadata"]["labels"]  # pods of another model do not count
    assert budget["minAvailable"] < MANIFESTS["Deployment"]["spec"]["replicas"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in (CONTAINER, *spec["initContainers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    known = {parameter.annotation.__metadata__[0].envvar for parameter in options()}
    set_here = {variable["name"] for variable in CONTAINER["env"]}
    assert set_here - known == {"HASHSEEK_CONFIG", "HASHSEEK_MILVUS_TOKEN", "OMP_NUM_THREADS"}
    [extras] = re.findall(r"pip install .*'\.\[([\w,]+)\]'$", image, re.M)
    assert is_in_milvus(CONTAINER["args"][1])
    assert "milvus" in extras.split(",")
    assert "milvus" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_settings_for_kubernetes_are_read_and_its_probes_are_answered(hashseek, indexed, tmp_path):
    [(name, settings)] = MANIFESTS["ConfigMap"]["data"].items()
    config = next(variable["value"] for variable in CONTAINER["env"] if variable["name"] == "HASHSEEK_CONFIG")
    places = {mount["mountPath"]: mount.get("subPath") for mount in CONTAINER["volumeMounts"]}
    assert places[config] == name
    (tmp_path / name).write_text(settings)
    code, printed, err = hashseek(*CONTAINER["args"], "--config", tmp_path / name, "--print-config")
    assert (code, err) == (0, "")
    printed = tomllib.loads(printed)
    assert str(Path(printed["keys"]).parent) in places
    assert str(Path(printed["checkpoint"]).parent) in places
    assert parse_uri(printed["collection"]).name.endswith(POD["metadata"]["labels"]["model"])
    probes = [CONTAINER[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    create("of.nobody", tmp_path / "keys.toml")
    with serving(
        indexed, keys=tmp_path / "keys.toml", allowed_hosts=printed["allowed_hosts"], host="0.0.0.0"
    ) as client:
        answers = [client.get(path, headers={"Host": "10.42.0.7:8000"}) for path in probes]  # as the kubelet asks
    assert [answer.json()["status"] for answer in answers] == ["ready", "ready", "live"]


def test_the_deployment_of_another_model_shares_nothing_with_the_first():
    """What the guide makes of it with sed."""
    others = manifests((KUBERNETES / "deployment.yaml").read_text().replace("m1", "m2"))
    for kind, found in others.items():
        kubernetes_validate.validate(found, "1.37", strict=True)
        assert found["metadata"]["name"] != MANIFESTS[kind]["metadata"]["name"]
    other = others["Deployment"]
    labels, service = other["spec"]["template"]["metadata"]["labels"], MANIFESTS["Service"]["spec"]["selector"]
    assert others["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert other["spec"]["selector"]["matchLabels"] == labels
    assert not service.items() <= labels.items()
    assert {**service, "model": "m2"}.items() <= labels.items()  # after `kubectl patch service`
    [container] = other["spec"]["template"]["spec"]["containers"]
    changed = [new for new, old in zip(container["args"], CONTAINER["args"], strict=True) if new != old]
    assert [parse_uri(place).name for place in changed] == ["pictures_m2"]
