"""A lockstep run over real gRPC equals synchronous DiLoCo, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.reference.synchronous_diloco import synchronous_diloco
from tests.support.cli import in_own_process
from wan_diloco.config import load_config
from wan_diloco.learner.setup import open_shard
from wan_diloco.models import build_model, run_layout

PERIODS = 5
PERIOD_STEPS = 6

CONFIG = """
[run]
name = "lockstep"
seed = 7
tokens = {tokens}
start_timeout = "120s"
[model]
dim = 32
layers = 2
heads = 2
sequence_length = 32
[data]
source = "text:{corpus}"
[inner]
lr = 3e-3
warmup_steps = 4
batch_tokens = 128
[outer]
merge = "{merge}"
lr = 0.8
momentum = 0.5
momentum_warmup_steps = 12
[sync]
fragments = 5
period_steps = {period_steps}
overlap_steps = 0
quorum = 2
[wire]
codec = "f32"
[[regions]]
name = "north"
[[regions]]
name = "south"
"""


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_a_lockstep_run_equals_the_reference(merge: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "\n\n".join(f"Paragraph {number} says {number * number} and {number % 7}." for number in range(900))
    )
    path = tmp_path / "lockstep.toml"
    steps = PERIODS * PERIOD_STEPS
    path.write_text(CONFIG.format(tokens=steps * 256, corpus=corpus, merge=merge, period_steps=PERIOD_STEPS))
    run_folder, out = tmp_path / "run", tmp_path / "exported"

    done = in_own_process(["-m", "wan_diloco", "run", str(path), "--run-folder", str(run_folder)], timeout_s=240.0)
    assert done.exit_code == 0, done.stderr
    exported = in_own_process(["-m", "wan_diloco", "export", str(run_folder), "--out", str(out)])
    assert exported.exit_code == 0, exported.stderr

    config = load_config([path], env={}).config
    assert config.total_steps == steps
    torch.set_num_threads(1)
    expected = synchronous_diloco(
        config, build_model(config), run_layout(config), [open_shard(config, index) for index in range(2)]
    )
    published = load_file(out / "model.safetensors")
    for name, value in expected.items():
        assert torch.equal(published[name], value), name
    initial = dict(build_model(config).named_parameters())
    assert any(not torch.equal(initial[name], value) for name, value in expected.items())
