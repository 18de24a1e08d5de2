"""What a platform engineer sees: a real Prometheus on operator and trainers, the chart's rules and dashboards."""

import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from pipetransformer_operator.kube.client.api import Api
from tests.testkit.operator.builders import JobBuilder, make_job
from tests.testkit.operator.charts import monitors
from tests.testkit.operator.fake_kubelet import FakeKubelet, real_trainer
from tests.testkit.operator.namespace import Namespace, until
from tests.testkit.operator.operating import Operator
from tests.testkit.operator.prometheus import RULES, Prometheus, promtool, queries
from tools.dashboards import write
from tools.devcluster.layout import REPOSITORY

pytestmark = pytest.mark.timeout(240)
RULES_TEST = REPOSITORY / "tests" / "integration" / "rules_test.yaml"


def training_job(checkpoints: Path) -> JobBuilder:
    """Two stages until five of six blocks freeze at step 20, then one; it goes on for as long as it is looked at."""
    return (
        make_job()
        .set("model", {"name": "vit", "numLayers": 6, "hiddenSize": 32, "numHeads": 2, "mlpSize": 64})
        .set("training", {"steps": 1_000_000, "globalBatchSize": 128})
        .set("freeze", {"policy": "Explicit", "boundaries": [{"step": 20, "boundary": 5}]})
        .set("cache", {"policy": "Always", "memoryBytes": 1 << 28})
        .stages(2)
        .set("pipeline.packing", "Paper")
        .workers(2)
        .checkpoint(str(checkpoints))
        .on_pack("Release")
    )


@pytest.fixture
async def operator(api: Api, kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Operator]:
    """An operator that uses Kueue, which is not there."""
    running = Operator(kubeconfig, tmp_path / "operator.log")
    running.environment["PIPETRANSFORMER_KUEUE"] = "true"
    await running.start()
    yield running
    await running.kill()
    print((tmp_path / "operator.log").read_text())


@pytest.fixture
async def prometheus(operator: Operator, tmp_path: Path) -> AsyncIterator[Prometheus]:
    server = Prometheus(tmp_path / "prometheus", f"127.0.0.1:{operator.metrics_port}", monitors()["PodMonitor"])
    await server.start()
    yield server
    await server.stop()


async def test_no_panel_is_empty_while_real_trainers_shrink(
    namespace: Namespace, operator: Operator, kubelet: FakeKubelet, prometheus: Prometheus, tmp_path: Path
) -> None:
    kubelet.program = real_trainer
    await namespace.apply(training_job(tmp_path / "checkpoints"))
    await namespace.apply(make_job("doomed").set("runPolicy.backoffLimit", 0))
    variables = {"namespace": namespace.name, "job": "digits", "__rate_interval": "15s", "__range": "5m"}
    boards = {name: (write.FOLDER / name).read_text() for name in ("fleet.json", "job.json")}
    wanted = {found for name, text in boards.items() for found in queries(name, text, variables)}
    assert len(wanted) > 70
    seen: set[tuple[str, str]] = set()

    async def all_filled() -> bool:
        pods = await namespace.pods()
        prometheus.show_pods(list(pods.values()))
        for name, pod in pods.items():
            if name.startswith("doomed") and (process := kubelet.processes.get(pod["metadata"]["uid"])):
                process.kill()
        seen.update(await prometheus.filled(wanted - seen))
        return seen == wanted

    try:
        await until("all panels are filled", all_filled, 120)
    finally:
        print("empty:", *sorted(wanted - seen), sep="\n")
    assert await prometheus.unhealthy_rules() == []

    async def given_back() -> bool:
        return bool(await prometheus.query("namespace_job_name:pipetransformer_job_saved_gpus:rate5m > 0"))

    await until("the GPU that is given back shows", given_back)
    running = [pod for pod in (await namespace.pods()).values() if pod["status"]["phase"] == "Running"]
    pages = [operator.metrics, *(f"http://{pod['status']['podIP']}:9464" for pod in running)]
    async with aiohttp.ClientSession() as session:
        for page in pages:
            async with session.get(page) as response:
                check_metrics(await response.text())


def check_metrics(page: str) -> None:
    """Asks promtool whether names, types and help texts are as they should be."""
    done = subprocess.run(promtool("check", "metrics"), input=page, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_do_what_they_say() -> None:
    done = subprocess.run(promtool("test", "rules", RULES_TEST), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_seen_to_fire() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    assert len(alerts) > 10
    assert alerts == set(re.findall(r'alertname="(\w+)"', RULES_TEST.read_text()))
