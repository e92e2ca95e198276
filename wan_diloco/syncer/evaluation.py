"""The curve of a run: gives the evaluator the published model now and then, and at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from wan_diloco.algorithm.layout import Layout
from wan_diloco.errors import CheckpointError, ConfigError, StorageError, StorageUnusable
from wan_diloco.storage import Snapshot
from wan_diloco.syncer.evaluator_process import EvaluatorProcess
from wan_diloco.syncer.fragments_store import Hold, published_tensors
from wan_diloco.syncer.workers import Workers, in_executor
from wan_diloco.units import GlobalStep

__all__ = ["Curve"]


class Curve:
    """Gives the evaluator the published model every so many global steps, and at the end.

    Owner: the event loop.

    Args:
        run_folder: The run's.
        layout: Of its model.
        evaluator: Looks at what is published.
        workers: Where snapshots are written.
        every_steps: Between two points.
        from_step: The global step at which this syncer begins; at 0 the initial model is a point.
        report: Is told in one sentence what went wrong.
    """

    def __init__(
        self,
        run_folder: Path,
        layout: Layout,
        evaluator: EvaluatorProcess,
        workers: Workers,
        *,
        every_steps: int,
        from_step: GlobalStep,
        report: Callable[[str], None],
    ) -> None:
        """Publish nothing yet."""
        self._folder = run_folder / "published"
        self._layout = layout
        self._evaluator = evaluator
        self._workers = workers
        self._every_steps = every_steps
        self._report = report
        self._last_point = from_step // every_steps if from_step > 0 else -1

    async def start(self) -> None:
        """Start the evaluator; before gRPC is used.

        What is short now may be there when it is needed, and then it is started again.

        Raises:
            ConfigError: Its log can't be where it must be.
            StorageUnusable: So, or its program isn't one for us.
        """
        try:
            await self._evaluator.start()
        except StorageUnusable:
            raise
        except StorageError as exc:
            self._report(f"{exc}; it is tried again when there is something to evaluate")

    async def run(self) -> None:
        """Hear the evaluator; what a former syncer published and nobody looked at comes first."""
        for name in sorted(path.name for path in self._folder.glob("step-*")):
            self._evaluator.ask(name, final=False)
        await self._evaluator.run()

    def due(self, step: GlobalStep) -> bool:
        """Whether a new point is reached, until it is taken."""
        return step // self._every_steps > self._last_point

    def took(self, step: GlobalStep) -> None:
        """The point is being published."""
        self._last_point = step // self._every_steps

    async def publish(self, step: GlobalStep, tokens: int, hold: Hold, *, elapsed_s: float) -> None:
        """Have the model of this moment evaluated, unless the evaluator is too far behind.

        Args:
            step: Now.
            tokens: Trained by all learners.
            hold: On the fragments of now; ended here.
            elapsed_s: Now, since the run began; its score is known later.
        """
        if self._evaluator.behind:
            hold.end()
            self._report(f"the model of step {step} isn't evaluated: the evaluator is behind")
            return
        await self._publish(f"step-{step:09d}", _manifest(step, tokens, elapsed_s), hold, final=False)

    async def finish(self, step: GlobalStep, tokens: int, hold: Hold, *, elapsed_s: float) -> str:
        """Have the final model evaluated on everything that was held out, and wait for it; arguments as `publish`.

        Returns:
            Why it wasn't, in a sentence; empty when it was.
        """
        await self._publish("final", _manifest(step, tokens, elapsed_s), hold, final=True)
        return await self._evaluator.finished()

    async def _publish(self, name: str, manifest: Mapping[str, float], hold: Hold, *, final: bool) -> None:
        def write() -> None:
            values = tuple(hold.values.values())
            Snapshot(tensors=published_tensors(self._layout, values), manifest=manifest).write(self._folder, name)

        try:
            await in_executor(self._workers.files, write)
        except CheckpointError:
            pass  # a former syncer wrote this very one
        except (StorageError, ConfigError) as exc:
            self._report(f"the model of step {manifest['global_step']} can't be published: {exc}")
            if not final:
                return
        finally:
            hold.end()
        self._evaluator.ask(name, final=final)


def _manifest(step: GlobalStep, tokens: int, elapsed_s: float) -> dict[str, float]:
    return {"global_step": step, "tokens": tokens, "published_s": elapsed_s}
