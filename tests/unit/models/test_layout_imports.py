"""A process that only wants to know the layout doesn't wait for torch's compiler."""

from __future__ import annotations

from tests.support.cli import in_own_process

PROGRAM = """
import sys
from wan_diloco.config import parse_config
from wan_diloco.models import run_layout
run_layout(parse_config({"run": {"name": "x", "tokens": "1M"}, "regions": [{"name": "a"}]}))
print([name for name in ("torch._dynamo", "sympy", "torch.onnx") if name in sys.modules])
"""


def test_the_layout_of_a_run_takes_no_compiler() -> None:
    outcome = in_own_process(["-c", PROGRAM])
    assert outcome.stdout.split() == ["[]"], outcome.stderr
