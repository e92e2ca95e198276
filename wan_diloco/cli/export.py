"""`wan-diloco export`: the published model of a run, for whoever wants to use it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wan_diloco.cli.folders import Holding, what_is_in
from wan_diloco.cli.options import folder_path, print_warning

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["export", "export_model", "register"]

_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog="Example: wan-diloco export runs/sotu --out model")(export)


def export(
    run_folder: Annotated[
        Path,
        typer.Argument(metavar="RUN_FOLDER", parser=folder_path, help="The folder of a run, finished or not."),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", parser=folder_path, help="Where to put the model; created if missing."),
    ],
) -> None:
    """Write a run's published model as safetensors.

    The published model is what all regions agree on, the same bits everywhere; not any region's own weights. It is
    taken from the newest snapshot of the run. A config.json beside it says what it is.
    """
    for path in export_model(run_folder, out, warn=print_warning):
        typer.echo(path)


def export_model(run_folder: Path, out: Path, *, warn: Callable[[str], None]) -> tuple[Path, Path]:
    """Write the published model of a run's newest good snapshot.

    Tensors have the names of the model's state dict. A tied weight is there once, and the model's `tied` says so, both
    in the file's metadata and in `config.json`.

    Args:
        run_folder: Of a run; it may be going on.
        out: Gets `model.safetensors` and `config.json`; neither may be there.
        warn: Told, in one sentence, that the run hasn't finished.

    Returns:
        The two paths, weights first.

    Raises:
        ConfigError: The folder holds no run, or one that has published nothing yet; or the files exist already, or
            can't be written, or would lie in the run's own state.
        CheckpointError: No snapshot is good.
        StorageError: The disk is full or the system refused.
    """
    from wan_diloco.errors import ConfigError
    from wan_diloco.storage import write_json
    from wan_diloco.storage.filesystem import ensure_folder

    _refuse_own_state(run_folder, out)
    weights, description = out / _WEIGHTS, out / _CONFIG
    for path in (weights, description):
        if path.exists():
            raise ConfigError("it is there already", where=str(path), hint="choose another --out")
    tensors, about = _published(run_folder, warn)
    ensure_folder(out)
    _save(tensors, about, weights)
    write_json(description, about)
    return weights, description


def _refuse_own_state(run_folder: Path, out: Path) -> None:
    """A state is what a restart finds: nothing else may lie in it."""
    from wan_diloco.errors import ConfigError

    state, target = (run_folder / "state").resolve(), out.resolve()
    if target == state or state in target.parents:
        raise ConfigError(
            "this is in the state of the run, which nothing else may be in", where=str(out), hint="choose another --out"
        )


def _published(run_folder: Path, warn: Callable[[str], None]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The model's tensors, and what is known about them."""
    from dataclasses import asdict

    from wan_diloco.config import load_stored
    from wan_diloco.errors import ConfigError
    from wan_diloco.models import decoder_config, run_layout
    from wan_diloco.protocol.state_json import state_from_json
    from wan_diloco.storage import latest_snapshot
    from wan_diloco.syncer.fragments_store import FragmentStore, published_tensors
    from wan_diloco.syncer.refragment import fragments_of

    holding = what_is_in(run_folder)
    if holding is Holding.BASELINE:
        raise ConfigError("a baseline was trained in this folder, and leaves no model", where=str(run_folder))
    if not (run_folder / "config.json").is_file():
        raise ConfigError("there is no run in this folder", where=str(run_folder))
    config = load_stored(run_folder / "config.json")
    latest = latest_snapshot(run_folder / "state" / "snapshots")
    if latest is None:
        raise ConfigError("the run hasn't written a snapshot yet", where=str(run_folder), hint="try again later")
    # The run may have been cut anew since.
    layout = run_layout(config, fragments=fragments_of(latest.snapshot.manifest))
    state = state_from_json(latest.snapshot.manifest["state"])
    step, versions = int(state.global_step), [str(version) for version in state.versions]
    if not any(version.count for version in state.versions):
        raise ConfigError(
            f"the newest snapshot, of step {step}, has nothing published yet: it is the model before all training",
            where=str(run_folder),
            hint="try again later",
        )
    if not state.ended or holding is not Holding.FINISHED_RUN:
        low, high = min(state.versions), max(state.versions)
        span = f"{low}" if low == high else f"{low} to {high}"
        steps = state.total_steps or config.total_steps
        warn(f"the run hasn't finished: this is step {step} of {steps}, fragments at version {span}")
    store = FragmentStore.restore(layout, latest.snapshot.tensors, state.versions)
    tensors = published_tensors(layout, store.values())
    about = {
        "kind": config.model.kind,
        "model": asdict(decoder_config(config)),
        "run": config.run.name,
        "global_step": step,
        "fragment_versions": versions,
    }
    return tensors, about


def _save(tensors: dict[str, torch.Tensor], about: dict[str, Any], path: Path) -> None:
    import json

    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from wan_diloco.errors import StorageError
    from wan_diloco.storage.filesystem import fsync_folder, fsync_path, temporary_name, translated, usual_mode

    temporary = path.parent / temporary_name(path.name)
    # "pt" is what other readers of safetensors expect to see.
    metadata = {"format": "pt", **{key: json.dumps(about[key]) for key in ("model", "run", "global_step")}}
    try:
        with translated("can't write", path):
            with usual_mode(temporary):
                save_file(tensors, temporary, metadata=metadata)
            fsync_path(temporary)
            temporary.replace(path)
            fsync_folder(path.parent)
    except SafetensorError as exc:
        raise StorageError(f"can't write {path}: {exc}") from exc
    finally:
        temporary.unlink(missing_ok=True)
