"""What of the dev cluster can be tested without a cluster: daemons, ports, disk, what broken runs leave, cache keys."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tools.devcluster import cluster, debian, disk, gobuild, host, images, node, preflight
from tools.devcluster.layout import Layout
from tools.devcluster.process import CommandError, Daemon, answers, run, wait_until


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


def test_a_daemon_whose_pid_file_a_full_disk_left_empty_is_taken_for_stopped(tmp_path: Path) -> None:
    daemon = Daemon("empty", tmp_path)
    daemon.pid_file.touch()

    assert daemon.pid is None
    daemon.stop()


def test_a_daemon_whose_pid_cannot_be_written_is_not_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = []

    def full(path: Path, text: str) -> None:
        pids.append(int(text.split()[0]))
        raise OSError("no space left on device")

    monkeypatch.setattr("tools.devcluster.process.write_whole", full)

    with pytest.raises(OSError, match="no space"):
        Daemon("unknown", tmp_path).start(["sleep", "60"])

    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_an_empty_record_of_images_is_one_of_none() -> None:
    layout = Layout(name="full")
    layout.state.mkdir(parents=True)
    (layout.state / "images.json").touch()

    assert images.published(layout) == {}


def test_what_a_broken_control_plane_left_is_stopped_before_ports_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout, checked = Layout(name="broken"), []
    etcd = Daemon("etcd", layout.run)
    etcd.start(["sleep", "60"])
    monkeypatch.setattr(disk, "shortage", lambda *_, **__: "")
    monkeypatch.setattr(preflight, "check", lambda **_: checked.append(etcd.pid))
    monkeypatch.setattr("tools.devcluster.controlplane.start", lambda *_, **__: None)

    try:
        cluster.up_control_plane(layout)
    finally:
        etcd.stop()

    assert checked == [None]


def test_a_run_that_uses_a_cluster_keeps_others_out() -> None:
    layout = Layout(name="shared")

    with (
        cluster.held(layout),
        pytest.raises(CommandError, match="another run uses the cluster shared"),
        cluster.held(layout),
    ):
        pass

    with cluster.held(layout):
        pass  # it is free again


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to the cluster. It is up from `up` to `down`."""
    made: list[str] = []
    monkeypatch.setattr(cluster, "is_up", lambda _: made[-1:] == ["up"])
    monkeypatch.setattr(cluster, "up", lambda _: made.append("up"))

    def down(layout: Layout) -> None:
        made.append("down")
        shutil.rmtree(layout.state)

    monkeypatch.setattr(cluster, "down", down)
    return made


def test_a_cluster_that_a_block_started_ends_with_it(calls: list[str]) -> None:
    with cluster.started():
        assert calls == ["up"]

    assert calls == ["up", "down"]


def test_a_cluster_that_was_up_stays(calls: list[str]) -> None:
    cluster.up(Layout())

    with cluster.started():
        pass

    assert calls == ["up", "up"], "missing parts are started"


def test_a_cluster_that_a_killed_block_left_is_replaced(calls: list[str]) -> None:
    """Its objects may be in any state, such as a release of helm that nobody can upgrade."""
    program = "from tools.devcluster import cluster; cluster.up = lambda _: __import__('os')._exit(9); "
    left = subprocess.run([sys.executable, "-c", f"{program} cluster.started().__enter__()"], check=False)
    calls.append("up")

    with cluster.started():
        assert calls == ["up", "down", "up"]

    assert left.returncode == 9
    assert calls == ["up", "down", "up", "down"]


def test_a_cluster_stays_if_its_user_wants_to_keep_it(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPETRANSFORMER_KEEP_CLUSTER", "1")

    for _ in range(2):
        with cluster.started():
            pass

    assert calls == ["up", "up"]


def test_a_hosts_file_loses_no_line_when_a_node_gets_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost")
    monkeypatch.setattr(host, "_HOSTS", hosts)

    host.name_node(0)
    host.name_node(0)

    first, second = hosts.read_text().splitlines()
    assert (first, second.split()[:2]) == ("127.0.0.1 localhost", ["127.0.0.1", "node0"])


def test_what_a_node_left_on_the_host_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(name="left")
    layout.snapshot.parent.mkdir(parents=True)
    layout.snapshot.touch()
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_HOSTS", tmp_path / "hosts")
    monkeypatch.setattr(host, "succeeds", lambda *_, **__: False)
    (tmp_path / "hosts").touch()
    before = host.leftovers(layout)  # those of a cluster that runs now

    groups = [tmp_path / "cgroup" / "node1", tmp_path / "cgroup" / "memory" / "node0"]
    for group in groups:
        group.mkdir(parents=True)
    host.name_node(1)

    left = [what for what in host.leftovers(layout) if what not in before]
    assert left[:2] == [f"cgroup {groups[1]}", f"cgroup {groups[0]}"]
    assert left[2].startswith("the line `127.0.0.1 node1 ")


def test_a_node_is_stopped_only_once_what_was_left_of_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, kill, killed = Layout(name="left"), os.kill, []
    shim = [sys.executable, "-c", "print(flush=True); input()", f"{layout.node(0)}/containerd.sock"]
    monkeypatch.setattr(host, "CGROUPS", tmp_path)

    def dies_late(pid: int, number: int) -> None:
        killed.append(pid)
        if len(killed) == 3:
            kill(pid, number)

    monkeypatch.setattr(os, "kill", dies_late)
    with subprocess.Popen(shim, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stray:
        assert stray.stdout is not None and stray.stdout.readline()  # before exec ends, /proc shows no command line
        node._kill_strays(layout, 0)
        assert stray.poll() == -signal.SIGKILL


@pytest.fixture
def gibs(monkeypatch: pytest.MonkeyPatch) -> dict[Path, float]:
    """What folders hold, in GiB; all programs are there."""
    held: dict[Path, float] = {}
    monkeypatch.setattr(disk, "_held", lambda folder: held.get(folder, 0))
    monkeypatch.setattr(gobuild, "has_kubernetes", lambda **_: True)
    monkeypatch.setattr(debian, "lacking", lambda programs: [])
    return held


def _fill(monkeypatch: pytest.MonkeyPatch, free_gib: float) -> None:
    usage = shutil.disk_usage("/")._replace(free=int(free_gib * (1 << 30)))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)


def test_disk_is_asked_for_what_is_not_there_yet(
    cache: Path, gibs: dict[Path, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout()
    nothing = sum(disk.missing(layout, nodes=2).values())
    gibs[layout.node_images(0)] = 2  # a pull that was cut off

    begun = sum(disk.missing(layout, nodes=2).values())
    gibs |= {layout.node_images(index): 6.1 for index in range(2)}
    gibs |= {cache / "pipetransformer" / "buildah": 9, cache / "pipetransformer" / "registry": 9}

    assert begun == pytest.approx(nothing - 2)
    assert sum(disk.missing(layout, nodes=2).values()) == pytest.approx(2), (
        "a machine that has it all is asked for room for an image"
    )
    assert sum(disk.missing(layout, nodes=0).values()) == pytest.approx(1), "a control plane asks for images"
    monkeypatch.setattr(gobuild, "has_kubernetes", lambda **_: False)
    monkeypatch.setattr(gobuild, "written_folders", lambda: [cache / "modules", cache / "builds"])
    assert sum(disk.missing(layout, nodes=0).values()) == pytest.approx(7)
    gibs |= {cache / "modules": 3.4, cache / "builds": 1.6}
    assert sum(disk.missing(layout, nodes=0).values()) == pytest.approx(2), "the first build was cut off"


@pytest.mark.parametrize(("complaint", "runs"), [("dial tcp: lookup proxy: i/o timeout", 2), ("undefined: x", 1)])
def test_go_runs_again_only_if_it_did_not_reach_the_network(
    complaint: str, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, ran = tmp_path / "go", tmp_path / "ran"
    fails = f'echo "{complaint}" >&2; exit 1'
    go.write_text(f'#!/bin/sh\necho >> {ran}\n[ $(wc -l < {ran}) = 2 ] && exec echo \'{{"Dir": "/there"}}\'\n{fails}\n')
    go.chmod(0o755)
    monkeypatch.setattr(gobuild, "_go", lambda: str(go))

    try:
        assert gobuild._module("kueue", "sigs.k8s.io/kueue") == Path("/there")
    except CommandError as error:
        assert complaint in str(error) and runs == 1

    assert ran.read_text().count("\n") == runs


def test_what_other_projects_have_in_gos_caches_is_not_taken_for_ours(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules, builds = cache / "modules", cache / "builds"
    monkeypatch.setattr(gobuild, "_go", lambda: "go")
    monkeypatch.setattr(gobuild, "run", lambda command: f"{modules}\n{builds}\n")
    assert not {modules, builds} & set(gobuild.written_folders())
    (modules / "k8s.io" / f"kubernetes@v{gobuild.KUBERNETES}").mkdir(parents=True)
    assert {modules, builds} < set(gobuild.written_folders())


def test_a_full_disk_names_each_part_that_is_missing(gibs: dict[Path, float], monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(monkeypatch, 20)
    assert disk.shortage(Layout(), nodes=0) == ""
    assert "20.0 GiB free, 30.7 are needed: 1.0 for the control plane, 7.2 for buildah" in disk.shortage(
        Layout(), nodes=2
    )


def test_only_stores_that_hold_more_than_one_build_give_way(cache: Path, gibs: dict[Path, float]) -> None:
    registry, nodes = cache / "pipetransformer" / "registry", [Layout().node_images(index) for index in range(2)]
    for folder in (registry, *nodes):
        folder.mkdir(parents=True)
    gibs |= {registry: 3.0, nodes[0]: 12.0, nodes[1]: 6.0}

    disk.drop_replaced(Layout())

    assert [folder.exists() for folder in (registry, *nodes)] == [True, False, True]


def test_old_builds_give_way_before_a_full_disk_is_refused(
    gibs: dict[Path, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = ["it is full", ""]
    dropped: list[Layout] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(disk, "shortage", lambda *_, **__: full.pop(0))
    monkeypatch.setattr(disk, "drop_replaced", dropped.append)

    cluster._check(Layout(), ports=(), nodes=2)
    assert dropped == [Layout()]

    full[:] = ["it is full", "it is full still"]
    with pytest.raises(CommandError, match="it is full still"):
        cluster._check(Layout(), ports=(), nodes=2)


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host that has nothing of what is asked for, and an apt that downloads the two packages in this folder."""
    programs, packages = tmp_path / "programs", tmp_path / "packages"
    for package, file in (
        ("one", "usr/bin/of-one"),
        ("one", "usr/bin/of-one-too"),
        ("two", "usr/lib/of-two"),
    ):
        content = packages / package / file
        content.parent.mkdir(parents=True, exist_ok=True)
        content.write_text("#!/bin/sh\n")
        content.chmod(0o755)
        control = packages / package / "DEBIAN" / "control"
        control.parent.mkdir(exist_ok=True)
        control.write_text(f"Package: {package}\nVersion: 1\nArchitecture: all\nMaintainer: us\nDescription: x\n")
        run(["dpkg-deb", "--build", packages / package, packages / f"{package}.deb"])
    programs.mkdir()
    fake = programs / "apt-get"
    fake.write_text(f'#!/bin/sh\ncp {packages}/*.deb "$XDG_CACHE_HOME/pipetransformer/debian/archives/"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setitem(debian.PACKAGE_OF, "of-one", "one")
    monkeypatch.setitem(debian.PACKAGE_OF, "of-one-too", "one")
    return packages


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="packages are Debian's")
def test_debian_packages_that_were_unpacked_in_part_are_not_taken_for_whole(
    apt: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = cache / "pipetransformer" / "debian" / "root"

    def cut_off(command: list[str | Path], **options: object) -> str:
        if command[0] == "dpkg-deb" and Path(command[2]).name == "two.deb":
            raise KeyboardInterrupt
        return run(command)

    monkeypatch.setattr(debian, "run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        debian.obtain(("of-one",))
    assert (unpacked / "usr/bin/of-one").exists()
    monkeypatch.setattr(debian, "run", run)

    debian.obtain(("of-one",))

    assert (unpacked / "usr/lib/of-two").exists()
    assert debian.lacking(("of-one",)) == []


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="packages are Debian's")
@pytest.mark.usefixtures("apt", "cache")
def test_two_programs_of_one_debian_package_are_unpacked_together() -> None:
    debian.obtain(("of-one", "of-one-too"))

    assert debian.lacking(("of-one", "of-one-too")) == []


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
            preflight.check(ports=ports, root=False, shortage="")


def test_loopback_is_asked_without_the_environments_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        assert answers(f"http://127.0.0.1:{server.server_port}/")
        serving.join()


def test_the_revision_is_that_of_a_checkout_whoever_owns_it(tmp_path: Path) -> None:
    assert images._revision(tmp_path) == ""
    run(["git", "init", "--quiet", tmp_path])
    (tmp_path / "file").touch()
    run(["git", "-C", tmp_path, "add", "file"])
    run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "one"])
    head = run(["git", "-C", tmp_path, "rev-parse", "HEAD"]).strip()

    if os.geteuid() == 0:
        for path in (tmp_path, tmp_path / ".git"):
            os.chown(path, 1000, 1000)

    assert images._revision(tmp_path) == head


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
