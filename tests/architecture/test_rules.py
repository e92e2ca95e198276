"""The house's rules on source code, on the whole package; and each rule on a snippet that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import pytest

from tests.support.sources import (
    Module,
    all_modules,
    ambient_chance,
    imports_of,
    long_functions,
    missing_header,
    non_ascii_lines,
    package_logic,
    reads_environment,
    reads_time,
    unpickling,
)

MODULE_LINES_MAX = 500
MODULES = all_modules()

Rule = Callable[[Module], Iterator[str]]


def findings(rule: Rule, *, except_in: tuple[str, ...] = ()) -> list[str]:
    """What breaks the rule anywhere but in the modules, or below the folders, that are named."""
    return list(chain.from_iterable(rule(module) for module in MODULES if not module.path.startswith(except_in)))


def importing(package: str) -> Rule:
    return lambda module: imports_of(module, package)


@pytest.mark.parametrize(
    ("rule", "snippet"),
    [
        (importing("torch.distributed"), "import torch.distributed as dist"),
        (importing("torch.distributed"), "from torch.distributed import ReduceOp"),
        (importing("torch.distributed"), "from torch import distributed"),
        (importing("torch.distributed"), "import torch\ntorch.distributed.barrier()"),
        (importing("grpc"), "def f():\n    import grpc.aio"),
        (importing("google.protobuf"), "from google.protobuf import message"),
        (importing("pydantic"), "from pydantic import BaseModel"),
        (reads_environment, "import os\nos.environ['A']"),
        (reads_environment, "import os as system\nsystem.environ.get('A')"),
        (reads_environment, "from os import environ"),
        (reads_environment, "import os\nos.getenv('A')"),
        (reads_time, "import time\ntime.monotonic()"),
        (reads_time, "from time import perf_counter"),
        (reads_time, "import datetime\ndatetime.datetime.now()"),
        (reads_time, "from datetime import datetime as d\nd.utcnow()"),
        (ambient_chance, "import random\nrandom.shuffle([])"),
        (ambient_chance, "from random import choice"),
        (ambient_chance, "import numpy as np\nnp.random.seed(1)"),
        (ambient_chance, "import torch\ntorch.manual_seed(1)"),
        (ambient_chance, "import torch\ntorch.randn(3)"),
        (unpickling, "import pickle"),
        (unpickling, "import torch\ntorch.load('x')"),
        (unpickling, "import numpy as np\nnp.load('x', allow_pickle=True)"),
        (long_functions, "def f():\n" + "    pass\n" * 70),
        (missing_header, "__all__ = []"),
        (missing_header, '"""A module."""\nx = 1'),
        (package_logic, '"""A package."""\nprint()'),
        (package_logic, '"""A package."""\nx = 1'),
        (non_ascii_lines, "# gr\u00fcn"),
    ],
)
def test_a_rule_finds_what_breaks_it(rule: Rule, snippet: str) -> None:
    assert list(rule(Module.of(snippet)))


@pytest.mark.parametrize(
    ("rule", "snippet"),
    [
        (importing("grpc"), "import grpcio_other"),
        (reads_time, "import asyncio\nasyncio.sleep(1)"),
        (reads_time, "def f(time):\n    return time.monotonic()"),
        (ambient_chance, "import random\nrng = random.Random(1)\nrng.random()"),
        (ambient_chance, "import torch\ntorch.randn(3, generator=torch.Generator())"),
        (unpickling, "import numpy as np\nnp.load('x', allow_pickle=False)"),
        (long_functions, "def f():\n" + "    pass\n" * 69),
        (missing_header, '"""A module."""\n__all__ = []'),
    ],
)
def test_a_rule_leaves_alone_what_keeps_it(rule: Rule, snippet: str) -> None:
    assert not list(rule(Module.of(snippet)))


def test_the_package_was_found() -> None:
    assert {"errors.py", "config/schema.py", "cli/main.py"} <= {module.path for module in MODULES}


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("torch.distributed", ("learner/",)),
        ("grpc", ("transport/",)),
        ("google.protobuf", ("wire/", "transport/")),
        ("pydantic", ("config/",)),
        ("numba", ("algorithm/",)),
        ("typer", ("cli/",)),
    ],
)
def test_a_library_is_used_only_where_it_is_at_home(package: str, homes: tuple[str, ...]) -> None:
    assert findings(importing(package), except_in=homes) == []


def test_the_environment_is_read_in_one_module_of_config_and_where_torchrun_speaks() -> None:
    assert findings(reads_environment, except_in=("config/environment.py", "learner/")) == []


def test_one_module_of_the_learner_at_most_reads_the_environment() -> None:
    readers = {module.path for module in MODULES if module.path.startswith("learner/") and [*reads_environment(module)]}
    assert len(readers) <= 1, readers


def test_only_the_clock_reads_time() -> None:
    assert findings(reads_time, except_in=("clock.py",)) == []


def test_chance_is_an_argument() -> None:
    assert findings(ambient_chance) == []


def test_nothing_is_unpickled() -> None:
    assert findings(unpickling) == []


def test_functions_fit_on_a_page() -> None:
    assert findings(long_functions) == []


def test_modules_have_an_end() -> None:
    lengths = {module.path: len(module.text.splitlines()) for module in MODULES}
    assert {path: length for path, length in lengths.items() if length > MODULE_LINES_MAX} == {}


def test_modules_say_what_they_are_and_what_they_offer() -> None:
    assert findings(missing_header, except_in=("__main__.py",)) == []


def test_packages_only_re_export() -> None:
    packages = [module for module in MODULES if module.path.endswith("__init__.py")]
    assert list(chain.from_iterable(package_logic(module) for module in packages)) == []


def test_source_code_is_ascii() -> None:
    assert findings(non_ascii_lines) == []
