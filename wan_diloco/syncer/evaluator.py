"""The evaluator's own process: how good the published model is, away from the syncer's threads.

It is told on stdin which snapshot to look at, a line of JSON each, and answers on stdout likewise; between
request and answer it says how far it is, so that nobody takes a slow evaluator for a dead one. The end of
stdin ends it, so that it never outlives its syncer. Evaluated snapshots are removed, since nothing else
needs them; the final one stays.

While the run goes on it steps behind syncer and learners; what the run's end waits for is done at full speed,
by a thread for each core: learners are gone by then. Threads of torch's own would be many times slower on a machine
on which anything else runs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import torch

from wan_diloco.clock import Clock, SystemClock
from wan_diloco.config import RunConfig, load_stored
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
# More would only take memory: a set is a few hundred batches.
_THREADS_MAX: Final = 8
# Between two words about how far an evaluation is.
_PROGRESS_EVERY_S: Final = 0.5
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
        self._test = encode_documents(self._split.test)

    def watch(self, looked_at: Callable[[int], None]) -> None:
        """Have somebody told of each batch that was looked at, by its tokens; from any thread."""
        self._model.register_forward_hook(lambda _module, inputs, _output: looked_at(inputs[0].numel()))

    def work(self, *, final: bool) -> int:
        """About how many tokens an evaluation looks at."""
        if not final:
            return min(len(self._validation), self._config.evaluation.tokens)
        return len(self._validation) + len(self._test) + _SAMPLE_BYTES * self._config.model.sequence_length

    def curve_point(self, name: str, *, threads: int) -> dict[str, Any]:
        """Evaluate a snapshot on the validation subset, and remove it.

        Raises:
            CheckpointError: The snapshot is missing or damaged.
        """
        values = self._load(name)
        loss = self._loss(self._validation, self._config.evaluation.tokens, threads)
        shutil.rmtree(self._run_folder / "published" / name, ignore_errors=True)
        return {**values, "validation_loss": loss, "final": False}

    def final(self, name: str, *, threads: int) -> dict[str, Any]:
        """Evaluate a snapshot on everything that was held out, let it write, and keep the result on disk.

        Raises:
            CheckpointError: The snapshot is missing or damaged.
            StorageError: The result can't be written.
        """
        values = self._load(name)
        losses = {
            "validation_loss": self._loss(self._validation, 0, threads),
            "test_loss": self._loss(self._test, 0, threads),
        }
        sample = generate(
            self._model, _PROMPT, _SAMPLE_BYTES, temperature=_SAMPLE_TEMPERATURE, seed=self._config.run.seed
        )
        result = {**values, **losses, "sample": decode_tokens(_PROMPT + sample), "snapshot": name}
        write_json(self._run_folder / "evaluation.json", result)
        return {**result, "final": True}

    def _load(self, name: str) -> Mapping[str, Any]:
        snapshot = load_snapshot(self._run_folder / "published", name)
        with torch.no_grad():
            for tensor_name, tensor in model_tensors(self._model).items():
                tensor.copy_(snapshot.tensors[tensor_name])
        return {key: snapshot.manifest[key] for key in ("global_step", "tokens", "published_s")}

    def _loss(self, tokens: npt.NDArray[np.uint8], tokens_max: int, threads: int) -> float:
        return evaluate(
            self._model,
            tokens,
            sequence_length=self._config.model.sequence_length,
            tokens_max=tokens_max,
            threads=threads,
        )


class _Progress:
    """Says now and then how far an evaluation is.

    Thread: any; the lock owns everything.
    """

    def __init__(self, say: Callable[[Mapping[str, Any]], None], clock: Clock) -> None:
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._name, self._work, self._done, self._said_s = "", 1, 0, 0.0

    def begin(self, name: str, work: int) -> None:
        with self._lock:
            self._name, self._work, self._done, self._said_s = name, max(1, work), 0, self._clock.now_s()

    def looked_at(self, tokens: int) -> None:
        with self._lock:
            self._done += tokens
            if self._clock.now_s() - self._said_s >= _PROGRESS_EVERY_S:
                self._said_s = self._clock.now_s()
                self._say({"snapshot": self._name, "progress": min(1.0, self._done / self._work)})


def serve(evaluator: Evaluator, requests: IO[str], answers: IO[str], *, threads: int = 1) -> None:
    """Answer until the requests end.

    Args:
        evaluator: Does the work.
        requests: Lines {"snapshot": name, "final": whether, "hurry": whether somebody waits for it}.
        answers: Gets a line for each: the result, or {"snapshot": name, "problem": sentence}; before it, lines
            {"snapshot": name, "progress": 0 to 1}.
        threads: For what somebody waits for.
    """

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    progress = _Progress(say, SystemClock())
    evaluator.watch(progress.looked_at)

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        name, final, hurry = request["snapshot"], request["final"], request["hurry"]
        progress.begin(name, evaluator.work(final=final))
        look = evaluator.final if final else evaluator.curve_point
        try:
            return {"snapshot": name, **look(name, threads=threads if hurry else 1)}
        except StorageError as exc:
            return {"snapshot": name, "problem": str(exc), "final": final}

    # Niceness is a thread's own on Linux, and can't be taken back: so there is a nice thread beside this one.
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(_NICENESS,)) as nice:
        for line in requests:
            request = json.loads(line)
            say(answer(request) if request["hurry"] else nice.submit(answer, request).result())


def main(arguments: list[str]) -> int:
    """Run the process.

    Args:
        arguments: The run's folder, in which `config.json` is.

    Returns:
        The exit code.
    """
    torch.set_num_threads(1)
    try:
        if len(arguments) != 1:
            raise ConfigError("the evaluator is given the run's folder and nothing else")
        run_folder = Path(arguments[0])
        config = load_stored(run_folder / "config.json")
        threads = min(len(os.sched_getaffinity(0)), _THREADS_MAX)
        serve(Evaluator(config, run_folder), sys.stdin, sys.stdout, threads=threads)
    except WanDilocoError as exc:
        sys.stderr.write(f"evaluator: {exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
