"""What the kernel says about TCP connections."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from wan_diloco.protocol.link_plan import TcpLimits

__all__ = ["tcp_limits"]

_FOLDER: Final = Path("/proc/sys/net/ipv4")
# Linux's own defaults, for where there is nothing to read.
_DEFAULTS: Final = TcpLimits(receive_bytes_max=6 * 2**20, send_bytes_max=4 * 2**20, congestion="cubic")


def tcp_limits(folder: Path = _FOLDER) -> TcpLimits:
    """Of this machine, or of an ordinary one where it doesn't say.

    Args:
        folder: Where the kernel's settings are.
    """
    try:
        return TcpLimits(
            receive_bytes_max=int((folder / "tcp_rmem").read_text().split()[2]),
            send_bytes_max=int((folder / "tcp_wmem").read_text().split()[2]),
            congestion=(folder / "tcp_congestion_control").read_text().strip(),
        )
    except (OSError, ValueError, IndexError):
        return _DEFAULTS
