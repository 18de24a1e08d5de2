"""Where the trainer's tests compute: on the CPU, or with `TRAINER_TESTS_DEVICE=cuda` on the GPUs of this machine."""

import os

import torch

_NAME = "TRAINER_TESTS_DEVICE"


def choose_device(worker: int) -> torch.device:
    """The device of a worker in a process of its own. Several workers may have one GPU."""
    if os.environ.get(_NAME, "cpu") == "cpu":
        return torch.device("cpu")
    # NCCL refuses two ranks on one GPU of one host. So each worker is a host of its own here, reached by TCP.
    os.environ |= {"NCCL_HOSTID": f"worker-{worker}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    device = torch.device("cuda", worker % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
