"""Exporting the published model, from a state folder as the syncer writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.support.snapshots import save_snapshot
from wan_diloco.algorithm.publication import digest
from wan_diloco.cli.export import export_model
from wan_diloco.cli.main import build_app
from wan_diloco.config import RunConfig, parse_config
from wan_diloco.errors import CheckpointError, ConfigError
from wan_diloco.models import Decoder, DecoderConfig, build_decoder, build_model, model_tensors, run_layout
from wan_diloco.protocol.syncer_state import SyncerState
from wan_diloco.syncer.fragments_store import FragmentStore, FragmentValue, published_tensors, snapshot_tensors
from wan_diloco.syncer.restore import snapshot_manifest, snapshot_name
from wan_diloco.units import Epoch, Version


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_config(*, tied: bool = True) -> RunConfig:
    return parse_config(
        {
            "run": {"name": "tiny", "tokens": "100k", "seed": 3},
            "model": {"dim": 16, "layers": 1, "heads": 2, "sequence_length": 16, "tied": tied},
            "inner": {"batch_tokens": 64},
            "sync": {"fragments": 3, "period_steps": 4},
            "regions": [{"name": "a"}, {"name": "b"}],
        }
    )


def quiet(_: str) -> None:
    """Where it doesn't matter whether the run has finished."""


class Run:
    """A run's folder with snapshots whose published model isn't the exact one, nor the initial one."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self.config = config
        model = build_model(config)
        self.layout = run_layout(config)
        self.fresh = FragmentStore.fresh(self.layout, model_tensors(model)).values()
        folder.mkdir()
        (folder / "config.json").write_text(config.resolved_json())

    @property
    def snapshots(self) -> Path:
        return self.folder / "state" / "snapshots"

    def finish(self) -> None:
        (self.folder / "summary.json").write_text('{"finished": true, "validation_nats_per_byte": 1.5}')
        (self.folder / "report.html").write_text("")

    def snapshot(self, sequence: int, *, merges: int = 2, ended: bool = True) -> dict[str, torch.Tensor]:
        """Write a snapshot with values of its own; what is published in it."""
        generator = torch.Generator().manual_seed(sequence)
        values = []
        for value in self.fresh:
            published_N = value.published_N + 0.1 * torch.randn(value.published_N.shape, generator=generator)
            values.append(
                FragmentValue(
                    version=value.version,
                    digest=digest(published_N),
                    exact_N=published_N + 0.5,
                    published_N=published_N,
                    momentum_N=value.momentum_N,
                )
            )
        state = SyncerState(
            parameters=tuple(fragment.numel for fragment in self.layout.fragments),
            initial_digests=tuple(value.digest for value in values),
            keep_updates=2,
        )
        state.global_step = 10 * sequence
        state.ended = ended
        # The first fragment is one merge behind, as some are most of the time.
        state.versions = [Version(Epoch(0), max(0, merges - (index == 0))) for index in range(len(values))]
        manifest = snapshot_manifest(state, self.config.agreement(), None)
        self.snapshots.mkdir(parents=True, exist_ok=True)
        save_snapshot(self.snapshots, snapshot_name(sequence), snapshot_tensors(values), manifest)
        return published_tensors(self.layout, values)


def logits(model: Decoder) -> torch.Tensor:
    tokens_BT = torch.arange(32).reshape(2, 16)
    with torch.inference_mode():
        logits_BTV: torch.Tensor = model(tokens_BT)
    return logits_BTV


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_answers_as_the_published_one(tmp_path: Path, *, tied: bool) -> None:
    config = tiny_config(tied=tied)
    run = Run(tmp_path / "run", config)
    run.snapshot(1)
    published = run.snapshot(12)
    expected = build_model(config)
    expected.load_state_dict(published)

    weights, description = export_model(tmp_path / "run", tmp_path / "out", warn=quiet)

    about = json.loads(description.read_text())
    loaded = build_decoder(DecoderConfig(**about["model"]), seed=99)
    loaded.load_state_dict(load_file(weights), strict=True)
    assert torch.equal(logits(loaded), logits(expected))
    assert about["global_step"] == 120
    assert about["run"] == "tiny"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_the_weights_describe_themselves(tmp_path: Path) -> None:
    Run(tmp_path / "run", tiny_config()).snapshot(1)
    weights, description = export_model(tmp_path / "run", tmp_path / "out", warn=quiet)
    with safe_open(weights, framework="pt") as file:
        metadata = file.metadata()
        names = set(file.keys())
    about = json.loads(description.read_text())
    assert metadata["format"] == "pt"
    assert json.loads(metadata["model"]) == about["model"]
    assert about["model"]["tied"] is True
    assert "lm_head.weight" not in names
    assert "embed.weight" in names


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", tiny_config())
    good = run.snapshot(1)
    run.snapshot(2)
    path = run.snapshots / snapshot_name(2) / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    weights, _ = export_model(tmp_path / "run", tmp_path / "out", warn=quiet)
    assert torch.equal(load_file(weights)["embed.weight"], good["embed.weight"])


def test_what_is_there_already_is_never_overwritten(tmp_path: Path) -> None:
    Run(tmp_path / "run", tiny_config()).snapshot(1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    with pytest.raises(ConfigError, match="there already"):
        export_model(tmp_path / "run", tmp_path / "out", warn=quiet)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    assert (tmp_path / "out" / "config.json").read_text() == "mine"


@pytest.mark.parametrize("out", ["run/state", "run/state/model", "link/deeper", "run/logs/../state"])
def test_nothing_is_exported_into_the_state_of_the_run(tmp_path: Path, out: str) -> None:
    Run(tmp_path / "run", tiny_config()).snapshot(1)
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run" / "state")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="in the state of the run"):
        export_model(tmp_path / "run", tmp_path / out, warn=quiet)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_without_a_run_or_a_snapshot_is_refused_and_nothing_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run in this folder"):
        export_model(tmp_path, tmp_path / "out", warn=quiet)
    Run(tmp_path / "run", tiny_config())
    with pytest.raises(ConfigError, match="hasn't written a snapshot"):
        export_model(tmp_path / "run", tmp_path / "out", warn=quiet)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("ended", "reported"), [(False, False), (True, False), (False, True)])
def test_a_run_that_hasnt_finished_is_exported_with_a_warning(tmp_path: Path, *, ended: bool, reported: bool) -> None:
    run = Run(tmp_path / "run", tiny_config())
    run.snapshot(3, ended=ended)
    if reported:
        run.finish()
    said: list[str] = []
    export_model(tmp_path / "run", tmp_path / "out", warn=said.append)
    assert said == ["the run hasn't finished: this is step 30 of 781, fragments at version 0.1 to 0.2"]


def test_a_finished_run_is_exported_without_a_word(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", tiny_config())
    run.snapshot(3)
    run.finish()
    said: list[str] = []
    export_model(tmp_path / "run", tmp_path / "out", warn=said.append)
    assert said == []


def test_the_model_before_all_training_is_no_export(tmp_path: Path) -> None:
    Run(tmp_path / "run", tiny_config()).snapshot(0, merges=0, ended=False)
    with pytest.raises(ConfigError, match="nothing published yet"):
        export_model(tmp_path / "run", tmp_path / "out", warn=quiet)
    assert not (tmp_path / "out").exists()


def test_a_baseline_leaves_no_model(tmp_path: Path) -> None:
    Run(tmp_path / "run", tiny_config())
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="a baseline was trained in this folder"):
        export_model(tmp_path / "run", tmp_path / "out", warn=quiet)


def test_others_may_read_the_model_as_the_umask_says(tmp_path: Path) -> None:
    Run(tmp_path / "run", tiny_config()).snapshot(1)
    before = os.umask(0o027)
    try:
        weights, _ = export_model(tmp_path / "run", tmp_path / "out", warn=quiet)
    finally:
        os.umask(before)
    assert weights.stat().st_mode & 0o777 == 0o640


def test_without_a_good_snapshot_nothing_is_exported(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", tiny_config())
    run.snapshot(1)
    (run.snapshots / snapshot_name(1) / "manifest.json").unlink()
    with pytest.raises(CheckpointError):
        export_model(tmp_path / "run", tmp_path / "out", warn=quiet)
    assert not (tmp_path / "out").exists()


def test_the_command_prints_what_it_wrote(tmp_path: Path) -> None:
    Run(tmp_path / "run", tiny_config()).snapshot(1)
    result = CliRunner().invoke(build_app(), ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert result.stdout.split() == [str(tmp_path / "out" / name) for name in ("model.safetensors", "config.json")]
