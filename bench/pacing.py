"""Does the cap hold, is the link full, is control quick, and is the traffic even?

    python bench/pacing.py [--quick] [--json] [--seconds 20] [--repeats 3]

- `mean_over_cap`: a long transfer at a cap of 100 Mbit/s between two network namespaces, through the real client and
  server in two processes; bytes counted at the sender's interface, headers of all layers included. `_down`: updates.
- `window_over_allowed_max`: over all windows of at least 100 ms, what was carried over cap * length + one burst.
- `heartbeat_p99_ms`: round trip of small control messages meanwhile, with a tbf of the same rate behind our cap.
- `peak_over_mean_demo`, `peak_over_mean_64m`: one learner's uplink over a period of P = H = 24, tau = 2; the highest
  step's worth of bytes over the mean one. The demo's model over the memory transport in virtual time, 64 million
  parameters over gRPC on loopback.
- `peak_over_at_once`: the whole model in the uplink's share of one window, over our peak; the lower of the two models'.

The first three need root, `ip` and `tc`, and are skipped with the reason elsewhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import pacing_peak
import pacing_wire
from machine import machine

from wan_diloco.lab.namespaces import why_not

WIRE_KEYS = ("mean_over_cap", "window_over_allowed_max", "acknowledgements_over_cap")


def wire(seconds: float) -> dict[str, float]:
    """The figures of the wire, once."""
    found = {}
    for direction, suffix in (("up", ""), ("down", "_down")):
        once = pacing_wire.one(direction, seconds, shaped=False)
        found |= {f"{key}{suffix}": once[key] for key in WIRE_KEYS}
    found["heartbeat_p99_ms"] = pacing_wire.one("up", seconds, shaped=True)["heartbeat_p99_ms"]
    return found


def peaks(step_s: float) -> dict[str, float]:
    """The figures of one learner's uplink, once."""
    small, large = pacing_peak.in_virtual_time(pacing_peak.demo()), pacing_peak.over_grpc(pacing_peak.large(), step_s)
    return {
        "peak_over_mean_demo": small["peak_over_mean"],
        "peak_over_mean_64m": large["peak_over_mean"],
        "peak_over_at_once": min(small["peak_over_at_once"], large["peak_over_at_once"]),
    }


def measure(seconds: float, repeats: int, step_s: float) -> dict[str, Any]:
    """All figures: medians, and the extremes beside them."""
    result: dict[str, Any] = {"machine": machine(), "repeats": repeats}
    result["time_of_the_demo_model"] = "virtual"
    reason = why_not()
    if reason:
        result["wire_skipped"] = reason
    rounds = []
    for number in range(repeats):
        rounds.append(({} if reason else wire(seconds)) | peaks(step_s))
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr)
    for key in rounds[0]:
        values = [once[key] for once in rounds]
        result |= {key: statistics.median(values), f"{key}_min": min(values), f"{key}_max": max(values)}
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of a few seconds each")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each transfer")
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    result = measure(5.0, 1, 0.25) if chosen.quick else measure(chosen.seconds, chosen.repeats, 1.0)
    if chosen.json:
        print(json.dumps(result, indent=2))
        return
    print(json.dumps(result["machine"]))
    for key, value in result.items():
        if f"{key}_min" in result:
            print(f"{key:<32} {value:.3f} ({result[f'{key}_min']:.3f} to {result[f'{key}_max']:.3f})")
    if "wire_skipped" in result:
        print(f"nothing of the wire: {result['wire_skipped']}")


if __name__ == "__main__":
    main()
