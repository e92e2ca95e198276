"""Machine code that is kept must be that of these sources."""

from __future__ import annotations

import shutil
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
