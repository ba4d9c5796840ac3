# SPDX-License-Identifier: Apache-2.0
"""What is in `deploy/` agrees with itself, with the package and with what the package needs. No container is made here."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

import pytest
import yaml

from kvcached.config import describe_settings, load_settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
MANIFEST = ROOT / "deploy" / "kubernetes.yaml"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))
DRAIN_S = 30
ENGINES = ("chat", "coder")


class Container(NamedTuple):
    pod: dict[str, Any]
    facts: dict[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        return {entry["name"]: entry.get("value", "") for entry in self.facts.get("env", ())}

    @property
    def mounts(self) -> dict[str, str]:
        """Names of volumes by their paths."""
        return {mount["mountPath"]: mount["name"] for mount in self.facts.get("volumeMounts", ())}

    @property
    def volumes(self) -> dict[str, Any]:
        return {volume["name"]: volume for volume in self.pod.get("volumes", ())}

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.facts["ports"]}


def of_kind(*kinds: str) -> Iterator[dict[str, Any]]:
    return (document for document in DOCUMENTS if document["kind"] in kinds)


def container_of(name: str) -> Container:
    (workload,) = (document for document in of_kind("Deployment", "DaemonSet") if document["metadata"]["name"] == name)
    pod = workload["spec"]["template"]["spec"]
    (facts,) = pod["containers"]
    return Container(pod, facts)


WORKLOADS = [document["metadata"]["name"] for document in of_kind("Deployment", "DaemonSet")]


def models_file() -> str:
    (found,) = of_kind("ConfigMap")
    text: str = found["data"]["models.yaml"]
    return text


# ---------------------------------------------------------------------- Kubernetes


def test_each_object_is_there_once_and_in_the_namespace() -> None:
    names = [(document["kind"], document["metadata"]["name"]) for document in DOCUMENTS]
    assert len(names) == len(set(names))
    (namespace,) = of_kind("Namespace")
    assert {document["metadata"].get("namespace") for document in DOCUMENTS if document is not namespace} == {namespace["metadata"]["name"]}
    assert set(WORKLOADS) == {"gateway", "metrics", *ENGINES}


def test_the_gateways_file_has_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(models_file(), encoding="utf-8")
    (key,) = (entry["name"] for entry in container_of("gateway").facts["env"] if "secretKeyRef" in entry["valueFrom"])
    command = [sys.executable, "-m", "kvcached.cli.main", "serve", str(file), "--check"]
    for environment, code in (({key: "at-least-eight"}, 0), ({}, 2)):
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stdout + done.stderr


def test_services_lead_to_pods_and_the_gateway_to_services() -> None:
    services = {document["metadata"]["name"]: document["spec"] for document in of_kind("Service")}
    for name, service in services.items():
        (workload,) = (document for document in of_kind("Deployment", "DaemonSet") if document["metadata"]["name"] == name)
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert service["selector"] == workload["spec"]["selector"]["matchLabels"] == labels
        assert {port["targetPort"] for port in service["ports"]} <= set(container_of(name).ports)
    models = yaml.safe_load(models_file())["models"]
    assert set(models) == set(ENGINES)
    for name, model in models.items():
        address = urlsplit(model["address"])
        assert address.port in {port["port"] for port in services[str(address.hostname)]["ports"]}
        command = container_of(name).facts["command"]
        assert command[command.index("--served-model-name") + 1] == name, "what the gateway calls it"


@pytest.mark.parametrize("name", WORKLOADS)
def test_ports_are_those_of_the_programs(name: str) -> None:
    container = container_of(name)
    command = container.facts.get("command", ())
    listen = (
        yaml.safe_load(models_file())["listen"]
        if name == "gateway"
        else command[-1]
        if name == "metrics"
        else f"0.0.0.0:{port_of(command)}"
    )
    assert listen == f"0.0.0.0:{container.ports['http']}"


def port_of(command: list[str]) -> str:
    return command[command.index("--port") + 1]


@pytest.mark.parametrize("name", WORKLOADS)
def test_probes_look_where_something_answers(name: str) -> None:
    facts = container_of(name).facts
    probes = [facts[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe") if probe in facts]
    assert {probe["httpGet"]["path"] for probe in probes} == {"/metrics" if name == "metrics" else "/health"}
    assert all(probe["httpGet"]["port"] in container_of(name).ports for probe in probes)
    assert "readinessProbe" in facts


@pytest.mark.parametrize("name", ["gateway", *ENGINES])
def test_a_pod_that_ends_has_time_for_its_open_streams(name: str) -> None:
    container = container_of(name)
    _, pause_s = container.facts["lifecycle"]["preStop"]["exec"]["command"]
    assert container.pod["terminationGracePeriodSeconds"] >= int(pause_s) + DRAIN_S + 10
    command = container.facts.get("command", ())
    assert name == "gateway" or command[command.index("--shutdown-timeout") + 1] == str(DRAIN_S)


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_is_mounted_is_there(name: str) -> None:
    container = container_of(name)
    assert set(container.mounts.values()) == set(container.volumes)


def test_all_that_share_a_card_meet_in_one_directory_of_the_node_as_one_user() -> None:
    places = set()
    for name in (*ENGINES, "metrics"):
        container = container_of(name)
        run_dir = container.environment["KVCACHED_RUN_DIR"]
        volume = container.volumes[container.mounts[run_dir]]
        user = container.facts.get("securityContext", {}).get("runAsUser", container.pod.get("securityContext", {}).get("runAsUser"))
        places.add((run_dir, volume["hostPath"]["path"], volume["hostPath"]["type"], user, json.dumps(container.pod["nodeSelector"])))
    assert len(places) == 1, places
    assert "KVCACHED_RUN_DIR" not in container_of("gateway").environment, "its models are remote"


def test_nothing_else_of_the_node_is_shared() -> None:
    """Locks and sockets in the run directory are all that the engines need of each other."""
    assert not {"hostPID", "hostIPC", "hostNetwork"} & {key for name in WORKLOADS for key in container_of(name).pod}


def test_engines_differ_by_their_model_and_name_only() -> None:
    first, second = (container_of(name) for name in ENGINES)
    assert {first.environment.pop("KVCACHED_IPC_NAME"), second.environment.pop("KVCACHED_IPC_NAME")} == set(ENGINES)
    alike = [
        json.dumps({**container.pod, "containers": [{**container.facts, "command": None, "env": None}]}, sort_keys=True)
        for container in (first, second)
    ]
    assert alike[0] == alike[1]
    budgets = [{key: value for key, value in one.environment.items() if key != "KVCACHED_IPC_NAME"} for one in (first, second)]
    assert budgets[0] == budgets[1], "engines on one card name one budget"


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_elastic_has_a_card_and_room_in_shared_memory(name: str) -> None:
    container = container_of(name)
    assert container.environment["ENABLE_KVCACHED"] == "true"
    assert container.facts["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container.volumes[container.mounts["/dev/shm"]]["emptyDir"].keys() == {"medium", "sizeLimit"}
    known = {row.variable for row in describe_settings()} | {"HF_HOME"}
    assert set(container.environment) <= known


def test_a_user_without_a_home_has_settings_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's pod runs as a number that no user of the image has."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(RuntimeError):
        Path.home()
    assert load_settings({}).source_of("weight") == "default"


# ---------------------------------------------------------------------- Docker


def instructions() -> list[tuple[str, str]]:
    """Each instruction and what follows it, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


def test_both_stages_are_of_one_image_whose_engine_is_supported() -> None:
    stages = [rest for word, rest in instructions() if word == "FROM"]
    assert stages == ["${BASE} AS wheel", "${BASE}"], "a library built elsewhere may ask for another C library"
    assert instructions()[0][0] == "ARG"
    images = re.findall(r"BASE=(\S+):v([\d.]+)", DOCKERFILE.read_text(encoding="utf-8"))
    assert {image for image, _ in images} == {"vllm/vllm-openai", "lmsysorg/sglang"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for image, version in images:
        title = "vLLM" if "vllm" in image else "SGLang"
        lowest, highest = re.findall(rf"^\| {title} \| ([\d.]+) to ([\d.]+)", readme, re.MULTILINE)[0]
        assert numbers(lowest) <= numbers(version)[: len(numbers(lowest))] <= numbers(highest)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_image_installs_extras_that_are_there_and_starts_the_gateway() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"\}\[([a-z,]+)\]", DOCKERFILE.read_text(encoding="utf-8"))
    assert set(extras.split(",")) == {"controller", "metrics"} <= set(project["optional-dependencies"])
    assert f"/wheels/{project['name'].replace('-', '_')}-*.whl" in DOCKERFILE.read_text(encoding="utf-8")
    said = dict(instructions())
    program, command = json.loads(said["ENTRYPOINT"])
    assert program in project["scripts"]
    assert command == "serve"
    gateway = container_of("gateway")
    assert json.loads(said["CMD"]) == gateway.facts["args"]
    assert str(Path(gateway.facts["args"][0]).parent) in gateway.mounts
    assert said["EXPOSE"] == str(gateway.ports["http"])


def test_what_the_wheel_is_made_of_gets_into_the_build_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {line[1:] for line in rules if line.startswith("!")}
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, backend = built["project"], built["tool"]["scikit-build"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"], backend["cmake"]["source-dir"]}
    assert let_in == needed | {Path(package).parts[0] for package in backend["wheel"]["packages"]}
    assert all((ROOT / path).exists() for path in let_in)
    assert "**/*.so" in rules, "a library of this checkout is linked for this machine"
