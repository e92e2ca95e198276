"""Two network namespaces joined by a wire: a link of their own for two processes, shaped and counted.

Needs root and `ip`. Each packet leaves as it would on a real wire: segmentation isn't left to a card that isn't there,
which would count many packets as one, with one header.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from wan_diloco.errors import UsageError

__all__ = ["Shaper", "WirePair", "why_not"]

_COMMAND_S: Final = 30.0


def why_not() -> str:
    """Why namespaces can't be had here; empty when they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    name = f"wd{os.getpid():x}t"
    try:
        _call("ip", "netns", "add", name)
    except UsageError as exc:
        return str(exc)
    _call("ip", "netns", "delete", name)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaper:
    """A token bucket filter of the kernel's at one end.

    Attributes:
        rate_bytes_per_s: Of what it lets out.
        burst_bytes: What it lets out at once.
        queue_s: For how long a packet may wait in its queue before it is dropped.
    """

    rate_bytes_per_s: float
    burst_bytes: int = 32 * 1024
    queue_s: float = 0.2


class WirePair:
    """Two namespaces, `left` and `right`, with one interface each; a context: both are gone afterwards.

    Args:
        name: At most 6 letters; the process's id is added, so that two at the same time don't meet.
        subnet: Third number of 10.213.N.0/24, in which the ends are .1 and .2.
        left, right: Shapers of what each end sends.
    """

    def __init__(self, name: str, *, subnet: int = 0, left: Shaper | None = None, right: Shaper | None = None) -> None:
        """Nothing is made yet."""
        unique = f"{name}{os.getpid() % 0xFFFF:x}"
        self.left, self.right = f"{unique}l", f"{unique}r"
        self.left_address, self.right_address = f"10.213.{subnet}.1", f"10.213.{subnet}.2"
        self._shapers = (left, right)

    def __enter__(self) -> Self:
        """Make both, and the wire."""
        try:
            for namespace in (self.left, self.right):
                _call("ip", "netns", "add", namespace)
            peer = ("peer", "name", self.right, "netns", self.right)
            _call("ip", "link", "add", self.left, "netns", self.left, "type", "veth", *peer)
            addresses = (self.left_address, self.right_address)
            for namespace, address, shaper in zip((self.left, self.right), addresses, self._shapers, strict=True):
                _call("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", namespace)
                _call("ip", "-n", namespace, "link", "set", "lo", "up")
                _call("ip", "-n", namespace, "link", "set", namespace, "up", "gso_max_segs", "1")
                self.shape(namespace, shaper)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take both down."""
        self._remove()

    def shape(self, namespace: str, shaper: Shaper | None) -> None:
        """Shape what one end sends, from now on; None takes its shaper away."""
        root = ("tc", "-n", namespace, "qdisc")
        if shaper is None:
            subprocess.run([*root, "delete", "dev", namespace, "root"], capture_output=True, check=False)
            return
        rate, queue = f"{8 * shaper.rate_bytes_per_s:.0f}bit", f"{1000 * shaper.queue_s:.0f}ms"
        words = ("tbf", "rate", rate, "burst", str(shaper.burst_bytes), "latency", queue)
        _call(*root, "replace", "dev", namespace, "root", *words)

    def command(self, namespace: str, *words: str) -> list[str]:
        """The command line that runs another one inside."""
        return ["ip", "netns", "exec", namespace, *words]

    def _remove(self) -> None:
        for namespace in (self.left, self.right):
            subprocess.run([shutil.which("ip") or "ip", "netns", "delete", namespace], capture_output=True, check=False)


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_COMMAND_S)
    if done.returncode != 0:
        raise UsageError(f"{' '.join(words)}: {done.stderr.strip()}")
