"""What of the dev cluster can be tested without a cluster: daemons, ports, preflight, the cache's keys."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tools.devcluster import gobuild, preflight
from tools.devcluster.layout import Layout
from tools.devcluster.process import CommandError, Daemon, run, wait_until


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_daemon_runs_until_it_is_stopped(tmp_path: Path) -> None:
    daemon = Daemon("sleeper", tmp_path)
    daemon.start(["sleep", "60"])
    pid = daemon.pid
    assert pid is not None

    daemon.start(["sleep", "60"])
    assert daemon.pid == pid, "a second start made a second process"
    daemon.stop()

    assert daemon.pid is None
    assert not daemon.pid_file.exists()


def test_a_pid_that_somebody_else_got_since_is_not_taken_for_ours(tmp_path: Path) -> None:
    daemon = Daemon("reused", tmp_path)
    daemon.pid_file.write_text(f"{os.getpid()} 1")

    assert daemon.pid is None
    daemon.stop()


def test_a_daemon_that_dies_before_it_is_ready_says_why(tmp_path: Path) -> None:
    daemon = Daemon("broken", tmp_path)
    daemon.start(["sh", "-c", "echo no such flag >&2; exit 1"])

    with pytest.raises(CommandError, match="no such flag"):
        daemon.wait_ready(lambda: False, seconds=5)


def test_a_failed_command_says_what_it_said() -> None:
    with pytest.raises(CommandError, match=r"(?s)`sh -c.*ended with 3.*out.*err"):
        run(["sh", "-c", "echo out; echo err >&2; exit 3"])


def test_waiting_in_vain_names_what_was_awaited() -> None:
    with pytest.raises(TimeoutError, match="the moon"):
        wait_until(lambda: False, "the moon", seconds=0.01, every=0.001)


def test_preflight_lists_every_port_in_use_at_once() -> None:
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        ports = [listener.getsockname()[1] for listener in (first, second)]

        with pytest.raises(CommandError, match=f"{ports[0]}, {ports[1]}"):
            preflight.check(ports=ports, free_gib=0, root=False)


def test_no_two_parts_of_a_cluster_share_a_port_and_neighbours_fit_20_apart() -> None:
    ports, neighbours = Layout(port=20000).all_ports(), Layout(port=20020).all_ports()

    assert len(set(ports)) == len(ports)
    assert not set(ports) & set(neighbours)


def test_the_cache_key_of_a_go_module_changes_with_its_sources(tmp_path: Path) -> None:
    module = tmp_path / "module"
    module.mkdir()
    (module / "go.mod").write_text("module m\n")
    before = gobuild.cache_key(module, "flags")

    (module / "go.sum").write_text("h1:other\n")

    assert gobuild.cache_key(module, "flags") != before
    assert gobuild.cache_key(module, "other flags") != gobuild.cache_key(module, "flags")
