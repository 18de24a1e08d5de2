"""Names the machine that a figure was measured on."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """Name of the processor's model."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    """Cores and processor in a few words."""
    return f"{os.cpu_count()} cores of {processor()}"
