"""Runs the real Volcano, its scheduler and its controllers, as processes beside the cluster's own scheduler."""

from __future__ import annotations

from tools.devcluster import controlplane, gobuild
from tools.devcluster.layout import Layout
from tools.devcluster.process import Daemon, answers, succeeds, wait_until

#: Volcano's Job is not used here, so neither are the controllers of its kinds.
_CONTROLLERS = "pg-controller,queue-controller"


def start(layout: Layout) -> None:
    """Apply Volcano's kinds, start its processes, and return once its default queue takes pods."""
    chart = gobuild.volcano_chart()
    controlplane.kubectl(layout, "apply", "--server-side", "-f", str(chart / "crd/bases"))
    kinds = "podgroups.scheduling.volcano.sh,queues.scheduling.volcano.sh,hypernodes.topology.volcano.sh,numatopologies"
    listing = [*controlplane.kubectl_command(layout), "get", kinds, "--all-namespaces"]
    wait_until(lambda: succeeds(listing), "Volcano's kinds are served")
    settings = f"--scheduler-conf={chart / 'config/volcano-scheduler.conf'}"
    _start(layout, "vc-scheduler", layout.volcano_port, settings)
    _start(layout, "vc-controller-manager", layout.volcano_port + 1, f"--controllers={_CONTROLLERS}")
    state = ["get", "queue", "default", "--output=jsonpath={.status.state}"]
    wait_until(lambda: controlplane.kubectl(layout, *state) == "Open", "Volcano's default queue is open")


def stop(layout: Layout) -> None:
    """Stop both processes. Their objects stay."""
    for program in ("vc-controller-manager", "vc-scheduler"):
        Daemon(program, layout.run).stop()


def _start(layout: Layout, program: str, port: int, option: str) -> None:
    daemon = Daemon(program, layout.run)
    address = f"127.0.0.1:{port}"
    daemon.start(
        [
            gobuild.volcano() / program,
            f"--kubeconfig={layout.kubeconfig}",
            "--leader-elect=false",
            "--enable-healthz=true",
            f"--healthz-address={address}",
            option,
        ]
    )
    daemon.wait_ready(lambda: answers(f"http://{address}/healthz"))
