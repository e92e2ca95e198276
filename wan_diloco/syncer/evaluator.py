"""The evaluator's own process: how good the published model is, away from the syncer's threads.

It is told on stdin which snapshot to look at, a line of JSON each, and answers on stdout likewise. The
end of stdin ends it, so that it never outlives its syncer. Evaluated snapshots are removed, since
nothing else needs them; the final one stays.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import torch

from wan_diloco.config import RunConfig, load_config
from wan_diloco.data import Split, decode_tokens, encode_documents, load_corpus, split_corpus
from wan_diloco.errors import ConfigError, StorageError, WanDilocoError
from wan_diloco.models import Decoder, build_model, generate, model_tensors
from wan_diloco.storage import load_snapshot, write_json
from wan_diloco.training import evaluate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Evaluator", "main", "serve"]

# Behind the syncer and the learners, in front of nothing.
_NICENESS: Final = 5
_SAMPLE_BYTES: Final = 400
_SAMPLE_TEMPERATURE: Final = 0.8
_PROMPT: Final = b"The "


class Evaluator:
    """Evaluates snapshots of one run.

    Args:
        config: The run's.
        run_folder: Where `published/` is, and where `evaluation.json` goes.

    Raises:
        DataError: The corpus can't be read.
    """

    def __init__(self, config: RunConfig, run_folder: Path) -> None:
        """Load the corpus and build the model once."""
        self._config = config
        self._run_folder = run_folder
        self._split: Split = split_corpus(load_corpus(config.data.source))
        self._model: Decoder = build_model(config)
        self._validation = encode_documents(self._split.validation)

    def curve_point(self, name: str) -> dict[str, Any]:
        """Evaluate a snapshot on the validation subset, and remove it.

        Raises:
            CheckpointError: The snapshot is missing or damaged.
        """
        values = self._load(name)
        loss = self._loss(self._validation, self._config.evaluation.tokens)
        shutil.rmtree(self._run_folder / "published" / name, ignore_errors=True)
        return {**values, "validation_loss": loss, "final": False}

    def final(self, name: str) -> dict[str, Any]:
        """Evaluate a snapshot on everything that was held out, let it write, and keep the result on disk.

        Raises:
            CheckpointError: The snapshot is missing or damaged.
            StorageError: The result can't be written.
        """
        values = self._load(name)
        sample = generate(
            self._model, _PROMPT, _SAMPLE_BYTES, temperature=_SAMPLE_TEMPERATURE, seed=self._config.run.seed
        )
        result = {
            **values,
            "validation_loss": self._loss(self._validation, 0),
            "test_loss": self._loss(encode_documents(self._split.test), 0),
            "sample": decode_tokens(_PROMPT + sample),
            "snapshot": name,
        }
        write_json(self._run_folder / "evaluation.json", result)
        return {**result, "final": True}

    def _load(self, name: str) -> Mapping[str, Any]:
        snapshot = load_snapshot(self._run_folder / "published", name)
        with torch.no_grad():
            for tensor_name, tensor in model_tensors(self._model).items():
                tensor.copy_(snapshot.tensors[tensor_name])
        return {key: snapshot.manifest[key] for key in ("global_step", "tokens")}

    def _loss(self, tokens: npt.NDArray[np.uint8], tokens_max: int) -> float:
        return evaluate(
            self._model,
            tokens,
            sequence_length=self._config.model.sequence_length,
            tokens_max=tokens_max,
        )


def serve(evaluator: Evaluator, requests: IO[str], answers: IO[str]) -> None:
    """Answer until the requests end.

    Args:
        evaluator: Does the work.
        requests: Lines {"snapshot": name, "final": whether}.
        answers: Gets a line for each: the result, or {"snapshot": name, "problem": sentence}.
    """
    for line in requests:
        request = json.loads(line)
        name = request["snapshot"]
        try:
            result = evaluator.final(name) if request["final"] else evaluator.curve_point(name)
        except StorageError as exc:
            result = {"problem": str(exc), "final": request["final"]}
        answers.write(json.dumps({"snapshot": name, **result}) + "\n")
        answers.flush()


def main(arguments: list[str]) -> int:
    """Run the process.

    Args:
        arguments: The run's folder, in which `config.json` is.

    Returns:
        The exit code.
    """
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    try:
        if len(arguments) != 1:
            raise ConfigError("the evaluator is given the run's folder and nothing else")
        run_folder = Path(arguments[0])
        config = load_config([run_folder / "config.json"], env={}).config
        serve(Evaluator(config, run_folder), sys.stdin, sys.stdout)
    except WanDilocoError as exc:
        sys.stderr.write(f"evaluator: {exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
