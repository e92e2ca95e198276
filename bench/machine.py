"""What machine a figure was measured on; printed with every figure."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil


def machine() -> dict[str, str | int | float]:
    """Processor, cores, memory and what else ran when the measurement began."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model,
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
