"""The files of deploy/: all flags, ports, paths and names in them are those of the command and the server."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures_server import visiting

from sameseed.cli import serve
from sameseed.export import vllm_installed
from sameseed.export.vllm import Installed
from sameseed.server import run
from sameseed.server.config import KEY_VARIABLE, Keys, ServerConfig
from sameseed.server.guard import OPEN
from sameseed.server.proxy import create_proxy
from sameseed.server.replicas import Replicas
from sameseed.server.run import LAST_WORDS
from sameseed.server.vllm import CLOSING, VllmClient

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KEY = "a-key-for-the-test"
LEAVING = 2.0  # seconds for connections to end at shutdown


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def kubernetes() -> dict[str, Any]:
    return {made["kind"]: made for made in documents("kubernetes.yaml")}


def container() -> dict[str, Any]:
    (made,) = kubernetes()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(made)


def compose() -> dict[str, Any]:
    (made,) = documents("compose.yaml")
    return dict(made)


def told(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Any]]:
    """vLLM's arguments, and what else `sameseed` would start with for these words; makes the model's folder."""
    found: dict[str, Any] = {}

    def start(arguments: list[str], facts: Any, config: ServerConfig, **more: Any) -> int:
        found.update(arguments=arguments, config=config, **more)
        return 0

    monkeypatch.setattr(run, "serve_vllm", start)
    monkeypatch.setattr(vllm_installed, "look", lambda python: Installed("0.33.0"))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    model = next(word.partition("=")[2] for word in words if word.startswith("--model="))
    (folder / model.lstrip("/")).mkdir(parents=True)
    assert words[0] == "serve"
    assert serve.run([w.replace(model, f"{folder}{model}") for w in words[1:]], "sameseed serve") == 0
    return found["arguments"], found


def test_the_pod_starts_what_we_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pod = container(), kubernetes()["Deployment"]["spec"]["template"]["spec"]
    arguments, found = told(made["args"], tmp_path, monkeypatch)
    config: ServerConfig = found["config"]
    assert config.host == "0.0.0.0" and len(config.keys) == 1 and found["python"] == "python3"
    assert [port["containerPort"] for port in made["ports"]] == [config.port]
    assert int(made["resources"]["limits"]["nvidia.com/gpu"]) == len(found["environments"]) == 2
    assert any(arguments[0].startswith(f"{tmp_path}{m['mountPath']}/") for m in made["volumeMounts"])
    assert {m["name"] for m in made["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    wait = float(made["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait + config.drain_timeout + LAST_WORDS + LEAVING + CLOSING


def test_the_pods_names_fit_together() -> None:
    made, all_of_it = container(), kubernetes()
    (monitor,) = documents("podmonitor.yaml")
    labels = all_of_it["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [all_of_it["Service"]["spec"]["selector"], monitor["spec"]["selector"]["matchLabels"]]
    selectors += [all_of_it[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    assert all(selector == labels for selector in selectors)
    (endpoint,), (port,) = monitor["spec"]["podMetricsEndpoints"], made["ports"]
    used = [endpoint["port"], all_of_it["Service"]["spec"]["ports"][0]["targetPort"]]
    used += [made["readinessProbe"]["httpGet"]["port"], made["livenessProbe"]["tcpSocket"]["port"]]
    assert set(used) == {port["name"]}
    (key,) = [e["valueFrom"]["secretKeyRef"] for e in made["env"] if e["name"] == KEY_VARIABLE]
    assert key == endpoint["authorization"]["credentials"]
    assert f"secret generic {key['name']} --from-literal={key['key']}=" in (DEPLOY / "kubernetes.yaml").read_text()


def test_compose_starts_what_we_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compose()["services"]["sameseed"]
    arguments, found = told(made["command"], tmp_path, monkeypatch)
    config: ServerConfig = found["config"]
    assert config.host == "0.0.0.0" and KEY_VARIABLE in made["environment"]
    assert made["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    assert made["deploy"]["resources"]["reservations"]["devices"][0]["count"] == len(found["environments"]) == 2
    assert made["volumes"][0].endswith(":/models:ro") and arguments[0] == f"{tmp_path}/models/target"
    assert float(made["stop_grace_period"].rstrip("s")) > config.drain_timeout + LAST_WORDS + LEAVING + CLOSING
    assert float(made["healthcheck"]["start_period"].rstrip("s")) >= config.load_timeout
    assert (
        f"'http://127.0.0.1:{config.port}{container()['readinessProbe']['httpGet']['path']}'"
        in (made["healthcheck"]["test"][-1])
    )
    assert made["command"] == container()["args"] and made["image"] == container()["image"]


async def test_the_paths_are_served() -> None:
    (job,) = documents("prometheus.yml")[0]["scrape_configs"]
    (monitor,) = documents("podmonitor.yaml")
    metrics = {job["metrics_path"], monitor["spec"]["podMetricsEndpoints"][0]["path"]}
    ready = container()["readinessProbe"]["httpGet"]["path"]

    def never_started(number: int, on_failure: Any) -> VllmClient:
        return VllmClient([], {"max_num_seqs": 2, "method": "none"}, python=sys.executable)

    config = ServerConfig(host="0.0.0.0", keys=Keys((KEY,)))
    app, _ = create_proxy(Replicas(never_started, 2), config)
    async with visiting(app) as client:
        assert ready in OPEN and (await client.get(ready)).status_code == 503  # not 401: probes have no key
        for path in metrics:
            assert (await client.get(path)).status_code == 401
            page = await client.get(path, headers={"authorization": f"Bearer {KEY}"})
            assert page.status_code == 200 and 'sameseed:engine_up{replica="1"}' in page.text


def test_the_image_has_the_command() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    (entry,) = re.findall(r'^ENTRYPOINT \["([^"]+)"\]$', text, re.MULTILINE)
    assert re.search(rf'^{Path(entry).name} = "sameseed.cli:main"$', project, re.MULTILINE)
    assert f"venv --without-pip {Path(entry).parents[1]}" in text and f"--python {Path(entry).parent}/python" in text
    (extra,) = re.findall(r"sameseed\[(\w+)\]", text)
    assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    assert 'wheel.py-api = "cp312"' in project and "-cp312-abi3-" in text
