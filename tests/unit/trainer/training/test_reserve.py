"""Memory is found before it is needed, and given back when it is not."""

import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipetransformer.training.memory_reserve import Reserve
from tests.testkit.trainer.ranks import run_ranks

pytestmark = pytest.mark.timeout(60)

SIZE = 256 << 20
PAGE = os.sysconf("SC_PAGESIZE")


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _fill_use_and_release(_: dist.ProcessGroup) -> tuple[int, int, int]:
    reserve = Reserve()
    before = _resident()
    reserve.fill(SIZE)
    filled = _faults()
    tensors = [torch.zeros(SIZE // 16, dtype=torch.uint8) for _ in range(8)]
    large = torch.empty(SIZE // 4, dtype=torch.uint8).zero_()
    faults = _faults() - filled
    reserve.release()
    held = _resident() - before
    del tensors, large
    reserve.release()
    return faults, held, _resident() - before


def test_reserved_memory_is_used_without_faults_and_returned_when_free() -> None:
    ((faults, held, left),) = run_ranks(1, _fill_use_and_release)

    assert faults < SIZE // PAGE // 20
    # Three quarters are in use; the kernel counts resident pages to within a few dozen.
    assert 0.749 * SIZE <= held < 0.85 * SIZE, "what is in use, and no more"
    assert left < 0.1 * SIZE
