"""A real Prometheus as a process: it scrapes what the tests start, by what the chart's monitors say."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from pipetransformer_contract.api.requests import Object
from tools.devcluster import debian
from tools.devcluster.layout import REPOSITORY

from .namespace import until
from .operating import free_port

RULES = REPOSITORY / "charts" / "pipetransformer" / "files" / "rules.yaml"
SECONDS = "1s"
#: By which the rules know the operator.
OPERATOR = {"namespace": "pipetransformer", "service": "pipetransformer"}
_META = "__meta_kubernetes_"


def promtool(*arguments: str | Path) -> list[str]:
    """A command line of promtool."""
    debian.obtain(debian.MONITORING)
    return [str(debian.program("promtool")), *map(str, arguments)]


def queries(title: str, dashboard: str, variables: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(panel, PromQL) of a dashboard's JSON, its variables filled in."""
    for panel in json.loads(dashboard)["panels"]:
        for target in panel.get("targets", []):
            filled = re.sub(r"\$(\w+)", lambda match: variables[match[1]], target["expr"])
            yield f"{title}: {panel['title']}", filled


class Prometheus:
    """One server with the chart's rules. Debian's build finds no pods by itself, so `show_pods` tells it what it would
    have found, by the labels that the Prometheus Operator's relabelling and the chart's PodMonitor read."""

    def __init__(self, folder: Path, operator: str, pod_monitor: Object, rules: Path = RULES) -> None:
        debian.obtain(debian.MONITORING)
        self._folder = folder
        self._port = free_port()
        self._targets = folder / "pods.json"
        (self._endpoint,) = pod_monitor["spec"]["podMetricsEndpoints"]
        configuration = {
            "global": {"scrape_interval": SECONDS, "evaluation_interval": SECONDS},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {
                    "job_name": "operator",
                    "honor_labels": True,
                    "static_configs": [{"targets": [operator], "labels": OPERATOR}],
                },
                {
                    "job_name": "workers",
                    "file_sd_configs": [{"files": [str(self._targets)], "refresh_interval": SECONDS}],
                    "relabel_configs": _relabelling(self._endpoint),
                    "metric_relabel_configs": [
                        {"source_labels": rule["sourceLabels"], "action": rule["action"], "regex": rule["regex"]}
                        for rule in self._endpoint["metricRelabelings"]
                    ],
                    "sample_limit": pod_monitor["spec"]["sampleLimit"],
                },
            ],
        }
        folder.mkdir(parents=True)
        self.show_pods([])
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns once it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(debian.program("prometheus")),
                f"--config.file={self._folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
                stdout=log,
                stderr=log,
            )

        async def answers() -> bool:
            try:
                return await self.query("vector(1)") != []
            except aiohttp.ClientError:
                return False

        await until("Prometheus answers", answers)

    async def stop(self) -> None:
        """Kills it."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    def show_pods(self, pods: list[Object]) -> None:
        """These pods run now: each of their ports with a name is a target."""
        groups = [
            {
                "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
                "labels": {
                    f"{_META}namespace": pod["metadata"]["namespace"],
                    f"{_META}pod_name": pod["metadata"]["name"],
                    f"{_META}pod_node_name": pod["spec"].get("nodeName", ""),
                    f"{_META}pod_container_name": container["name"],
                    f"{_META}pod_container_port_name": port["name"],
                    **{f"{_META}pod_label_{_sanitised(key)}": text for key, text in pod["metadata"]["labels"].items()},
                },
            }
            for pod in pods
            if pod["status"].get("podIP")
            for container in pod["spec"]["containers"]
            for port in container.get("ports", [])
        ]
        draft = self._targets.with_suffix(".draft")
        draft.write_text(json.dumps(groups))
        draft.replace(self._targets)

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of a PromQL expression."""
        url = f"http://127.0.0.1:{self._port}/api/v1/query"
        async with aiohttp.ClientSession() as session, session.get(url, params={"query": expression}) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    async def filled(self, wanted: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """Those of the (panel, PromQL) that show a number."""
        return {
            (panel, query)
            for panel, query in wanted
            if any(one["value"][1] != "NaN" for one in await self.query(query))
        }

    async def unhealthy_rules(self) -> list[str]:
        """Rules that could not be evaluated, with why."""
        url = f"http://127.0.0.1:{self._port}/api/v1/rules"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            groups = (await response.json())["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert rules
        return [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]


def _relabelling(endpoint: Object) -> list[Object]:
    """What the Prometheus Operator makes of an endpoint of a PodMonitor."""
    own = [
        {"source_labels": [f"{_META}{source}"], "target_label": target}
        for source, target in (("namespace", "namespace"), ("pod_container_name", "container"), ("pod_name", "pod"))
    ]
    port = {"action": "keep", "source_labels": [f"{_META}pod_container_port_name"], "regex": endpoint["port"]}
    given = [
        {"source_labels": rule["sourceLabels"], "target_label": rule["targetLabel"]} for rule in endpoint["relabelings"]
    ]
    return [port, *own, *given]


def _sanitised(label: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in label)
