"""How many bytes a worker's layers may take: declared, by its container's limit, or without bounds."""

from pathlib import Path

import pytest
import torch

from pipetransformer.errors import SpecError
from pipetransformer.training import worker_memory
from pipetransformer.training.worker_memory import container_bytes, host_apart, usable_bytes
from pipetransformer_contract.wire import Env

CPU = torch.device("cpu")
GIB = 1 << 30
#: What version 1 writes where nothing is limited.
UNLIMITED_V1 = 9223372036854771712


def machine(root: Path, groups: str, limits: dict[str, object]) -> Path:
    """A machine of 16 GiB with the process in `groups`, and limit files by their paths below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/meminfo").write_text(f"MemTotal:  {16 * GIB // 1024} kB\nMemFree:  1 kB\n")
    for path, limit in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/\n", {"memory.max": 4 * GIB}),
        ("0::/user.slice/job\n", {"user.slice/memory.max": 4 * GIB, "user.slice/job/memory.max": "max"}),
        ("0::/outer/inner\n", {"outer/memory.max": 4 * GIB, "outer/inner/memory.max": 8 * GIB}),
        ("0::/host/path/of/the/pod\n", {"memory.max": 4 * GIB}),
        (
            "5:memory:/pod\n0::/\n",
            {"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory/pod/memory.limit_in_bytes": 4 * GIB},
        ),
        ("5:cpu,memory:/kubepods/pod1/abc\n", {"memory/memory.limit_in_bytes": 4 * GIB}),
    ],
    ids=["container v2", "limit above", "lowest counts", "container's own view", "v1", "container v1"],
)  # fmt: skip
def test_the_limit_of_a_container_is_found(groups: str, limits: dict[str, object], tmp_path: Path) -> None:
    assert container_bytes(machine(tmp_path, groups, limits)) == 4 * GIB


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/\n", {}),
        ("0::/\n", {"memory.max": "max"}),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": UNLIMITED_V1}),
        ("0::/\n", {"memory.max": 64 * GIB}),
        ("3:cpu:/\n", {"memory.max": 4 * GIB}),
    ],
    ids=["no file", "v2 without", "v1 without", "above the machine", "no memory group"],
)
def test_a_host_without_a_limit_is_unlimited(groups: str, limits: dict[str, object], tmp_path: Path) -> None:
    assert usable_bytes(CPU, {}, machine(tmp_path, groups, limits)) == float("inf")


def test_a_machine_without_control_groups_is_unlimited(tmp_path: Path) -> None:
    assert usable_bytes(CPU, {}, tmp_path) == float("inf")


def test_the_process_itself_comes_off_a_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_memory, "_bytes_before_model", lambda: GIB)

    usable = usable_bytes(CPU, {}, machine(tmp_path, "0::/\n", {"memory.max": 5 * GIB}))

    assert usable == pytest.approx(worker_memory.USABLE_SHARE * 4 * GIB)


def test_a_limit_below_the_process_leaves_nothing(tmp_path: Path) -> None:
    assert usable_bytes(CPU, {}, machine(tmp_path, "0::/\n", {"memory.max": 1024})) == 0


def test_what_the_process_takes_is_measured_once_before_it_holds_layers() -> None:
    before = worker_memory._bytes_before_model()
    layers = torch.ones(64 << 20, dtype=torch.uint8)

    assert worker_memory._bytes_before_model() == before > 10 << 20
    assert len(layers)


def test_declared_bytes_count_in_place_of_the_containers_limit(tmp_path: Path) -> None:
    limited = machine(tmp_path, "0::/\n", {"memory.max": 4 * GIB})

    assert usable_bytes(CPU, {Env.DEVICE_BYTES: "123456"}, limited) == 123456
    assert usable_bytes(CPU, {Env.DEVICE_BYTES: ""}, limited) < 4 * GIB


@pytest.mark.parametrize("declared", ["8Gi", "-1", "0", "1e9"])
def test_declared_bytes_that_are_no_number_are_refused_by_name(declared: str) -> None:
    with pytest.raises(SpecError, match=f"spec.podTemplate: {Env.DEVICE_BYTES} must be a number of bytes above 0"):
        usable_bytes(CPU, {Env.DEVICE_BYTES: declared})


def test_only_declared_bytes_leave_room_for_frozen_layers_in_host_memory() -> None:
    assert host_apart(torch.device("cuda"), {})
    assert host_apart(CPU, {Env.DEVICE_BYTES: "123456"})
    assert not host_apart(CPU, {}), "a container's limit covers both"
