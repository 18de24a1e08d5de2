"""Where the trainer's tests compute: on the CPU, or with `TRAINER_TESTS_DEVICE=cuda` on the GPUs of this machine."""

import os

import torch

_ON_CPU = os.environ.get("TRAINER_TESTS_DEVICE", "cpu") == "cpu"


def watchdog_floor() -> float:
    """Floor of the watchdogs of these tests, in seconds.

    On the CPU it is beyond the tests' patience, because a death has to be noticed by the connections that it closes. A
    wait in NCCL notices no death, so there the watchdog ends it.
    """
    return 300.0 if _ON_CPU else 10.0


def choose_device(worker: int) -> torch.device:
    """The device of a worker in a process of its own. Several workers may have one GPU."""
    if _ON_CPU:
        return torch.device("cpu")
    # NCCL refuses two ranks on one GPU of one host. So each worker is a host of its own here, reached by TCP.
    os.environ |= {"NCCL_HOSTID": f"worker-{worker}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda", worker % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
