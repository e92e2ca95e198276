"""Machine code that is kept must be that of these sources."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wan_diloco.algorithm import kernels
from wan_diloco.algorithm.kernels import merging, passes
from wan_diloco.algorithm.kernels.compiled import sources_digest

PACKAGE = Path(kernels.__path__[0])


@pytest.mark.parametrize(
    "kernel", [passes.encode, passes.decode, passes.add, passes.measure, merging.merge_and_publish]
)
def test_kept_machine_code_is_named_after_all_sources(kernel):
    assert kernel.py_func.__qualname__.endswith(sources_digest(PACKAGE))


@pytest.mark.parametrize("changed", ["kernels/codes.py", "kernels/compiled.py", "blocks.py"])
def test_a_change_of_any_source_is_noticed(tmp_path, changed):
    """Of those too that a kernel only calls, which numba doesn't look at."""
    copy = tmp_path / "kernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "blocks.py", tmp_path)
    before = sources_digest(copy)
    assert before == sources_digest(PACKAGE)
    with (tmp_path / changed).open("a") as file:
        file.write("# another\n")
    assert sources_digest(copy) != before


SMALL = """
from numba import types
from wan_diloco.algorithm.kernels.compiled import VECTOR, entry

@entry(types.void, VECTOR)
def one(x):
    x[0] = 1
"""
USE_IT = """
import errno, sys
import numpy as np
from numba.core import caching

def refuse(*_):
    raise OSError(errno.ENOSPC, "full")

if sys.argv[1] == "full":
    caching.IndexDataCacheFile._open_for_write = refuse
import small
x = np.zeros(2, np.float32)
small.one(x)
assert x[0] == 1
print(sum(small.one.stats.cache_hits.values()))
"""


def use_it(folder: Path, disk: str = "") -> int:
    done = subprocess.run(
        [sys.executable, "-c", USE_IT, disk], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("damaged", ["*.nbi", "*.nbc"])
def test_kept_machine_code_that_cannot_be_read_is_made_anew(tmp_path, damaged):
    (tmp_path / "small.py").write_text(SMALL)
    assert use_it(tmp_path) == 0
    assert use_it(tmp_path) == 1
    (kept,) = tmp_path.rglob(damaged)
    kept.write_bytes(kept.read_bytes()[:40])
    assert use_it(tmp_path) == 0
    assert use_it(tmp_path) == 1


def test_who_only_reads_machine_code_waits_for_nobody_who_compiles(tmp_path, monkeypatch):
    """Whoever compiles may be stopped, and the lock with it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "small.py").write_text(SMALL)
    assert use_it(tmp_path) == 0
    (lock,) = tmp_path.glob("*.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert use_it(tmp_path) == 1


def test_a_disk_that_takes_nothing_keeps_no_kernel_from_being_compiled(tmp_path):
    (tmp_path / "small.py").write_text(SMALL)
    assert use_it(tmp_path, "full") == 0
    assert not list(tmp_path.rglob("*.nbi"))
