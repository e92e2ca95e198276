"""Shows a running run on stderr: a live table at a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from wan_diloco.cli.history import History
from wan_diloco.cli.view import RunView, facts, lagging, progress_line, region_cells, view_of
from wan_diloco.errors import TransportError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from wan_diloco.clock import Clock

__all__ = ["Display", "LineDisplay", "TableDisplay", "make_display", "run_table", "watch"]

_POLL_S: Final = 0.5
_STATUS_TIMEOUT_S: Final = 2.0
_LINE_EVERY_S: Final = 5.0


class Display(Protocol):
    """Where a run is shown; used as a context manager."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(self, *_: object) -> None:
        """Leave the screen as it should stay."""
        ...

    def show(self, view: RunView) -> None:
        """Show the run as it is now."""
        ...

    def say(self, text: str) -> None:
        """Say one sentence, to stay."""
        ...


def make_display(console: Console, clock: Clock) -> Display:
    """A table at a terminal, lines elsewhere.

    Args:
        console: Where to show it; it knows about NO_COLOR.
        clock: Spaces lines out.
    """
    return (
        TableDisplay(console) if console.is_terminal and not console.is_dumb_terminal else LineDisplay(console, clock)
    )


class LineDisplay:
    """A line every few seconds, for logs.

    Args:
        console: Where to print.
        clock: Spaces lines out.
    """

    def __init__(self, console: Console, clock: Clock) -> None:
        """Show nothing yet."""
        self._console = console
        self._clock = clock
        self._shown: tuple[float, str] | None = None

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to restore."""

    def show(self, view: RunView) -> None:
        """Print a line, unless the last one is too recent or says the same."""
        now_s, line = self._clock.now_s(), progress_line(view)
        if self._shown is None or (now_s - self._shown[0] >= _LINE_EVERY_S and line != self._shown[1]):
            self._shown = (now_s, line)
            self.say(line)

    def say(self, text: str) -> None:
        """Print it at once."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class TableDisplay:
    """A table that stays in place.

    Args:
        console: A terminal.
    """

    def __init__(self, console: Console) -> None:
        """Draw nothing yet."""
        from rich.live import Live

        self._console = console
        # Redrawn when there is news, not by a thread of its own.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        """Take a part of the screen."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last table standing."""
        self._live.stop()

    def show(self, view: RunView) -> None:
        """Redraw."""
        self._live.update(run_table(view), refresh=True)

    def say(self, text: str) -> None:
        """Print above the table."""
        self._console.print(text, markup=False, highlight=False)


def run_table(view: RunView) -> RenderableType:
    """A run as a table of regions, under a line about the whole and above what it waits for."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in ("region", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("step", "tokens", "loss", "step time", "merged, 1min", "sent", "received"):
        table.add_column(column, justify="right", no_wrap=True)
    for region in view.regions:
        # Text, not markup: what a peer says must not be able to draw.
        table.add_row(*map(Text, region_cells(region)), style="" if region.live and not region.lags else "yellow")
    # Not the table's title, which would be folded to the table's width.
    return Group(
        Text("   ".join(facts(view)), style="bold"),
        table,
        *(Text(reason, style="yellow", overflow="fold") for reason in (*lagging(view), *view.waiting)),
    )


async def watch(
    display: Display,
    *,
    address_path: Path,
    processes: Callable[[], Mapping[str, tuple[str, int]]],
    fetch: Callable[[str, float], Awaitable[Mapping[str, Any]]],
    clock: Clock,
    ending: Callable[[], bool],
    pids: Callable[[], Mapping[str, int]] = dict,
    poll_s: float = _POLL_S,
) -> None:
    """Show a run again and again until cancelled.

    Args:
        display: Where.
        address_path: Of the file with the syncer's address; it may come, go and change.
        processes: The condition and the restarts of the syncer and each region.
        fetch: Asks the syncer at an address for its status, within some seconds.
        clock: Measures how long things last.
        ending: Whether the processes were told to end.
        pids: Of the processes that run now, by name.
        poll_s: Between two looks.
    """
    history = History()
    announced = False
    status: Mapping[str, Any] | None = None
    while True:
        answering, address = False, _read(address_path)
        if address:
            with contextlib.suppress(TransportError):
                status = await fetch(address, _STATUS_TIMEOUT_S)
                answering = True
        if answering or status is None or not status.get("ended"):
            # A syncer that has ended the run falls silent while it writes the report.
            view = view_of(
                status,
                answering=answering,
                processes=processes(),
                history=history,
                now_s=clock.now_s(),
                ending=ending(),
            )
            display.show(view)
            if answering and not (view.ending or view.ended):
                if not announced and all(region.live for region in view.regions):
                    announced = True
                    numbers = ", ".join(f"{name} {pid}" for name, pid in pids().items())
                    display.say(f"wan-diloco: all are there; their processes: {numbers}")
                for text in _returns(view, history, pids, clock.now_s()):
                    display.say(f"wan-diloco: {text}")
        await asyncio.sleep(poll_s)


def _returns(view: RunView, history: History, pids: Callable[[], Mapping[str, int]], now_s: float) -> Iterator[str]:
    """Who is back since the last view."""
    for region in view.regions:
        absent_s = history.absence_s(region.name, region.restarts, now_s, there=region.live)
        if absent_s is not None:
            pid = pids().get(region.name)
            yield f"{region.name} is back after {absent_s:.0f} s" + ("" if pid is None else f", as process {pid}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
