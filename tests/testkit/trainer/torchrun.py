"""The environment that torchrun gives a rank."""

import os

import torch.distributed as dist


def set_rank(group: dist.ProcessGroup, port: int) -> None:
    """Make this process one that torchrun has started."""
    os.environ |= {
        "RANK": str(group.rank()),
        "WORLD_SIZE": str(group.size()),
        "LOCAL_WORLD_SIZE": str(group.size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
