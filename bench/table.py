"""README's tables of figures, made of what `make bench` measured; says what wasn't measured, and what misses its bar.

    python bench/table.py [--results bench/results] [--readme README.md] [--print]

Each program's JSON is RESULTS/PROGRAM.json. What stands in README between `<!-- bench:begin -->` and
`<!-- bench:end -->` is replaced, and so it is for `quality`, whose figures have a table of their own. With `--print`
the tables are printed, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quality

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {"merge": " --threads"}


@dataclass(frozen=True)
class Row:
    """A figure of README.

    Attributes:
        program: Of bench/, without `.py`.
        key: In its JSON.
        says: What it is.
        bar: What it should reach; None where it is only told.
        above: The bar is a lower one.
        worst: What is judged is the worst that was measured, and not the median.
    """

    program: str
    key: str
    says: str
    bar: float | None = None
    above: bool = False
    worst: bool = False

    def bar_text(self) -> str:
        """As a reader sees it."""
        if self.bar is None:
            return "-"
        return f"{'>=' if self.above else '<='} {self.bar:g}" + (", the worst" if self.worst else "")

    def judged(self, found: dict[str, Any]) -> float:
        """The figure that has to reach the bar."""
        extreme = f"{self.key}_{'min' if self.above else 'max'}"
        figure: float = found[extreme if self.worst else self.key]
        return figure

    def meets(self, found: dict[str, Any]) -> bool:
        """Whether what a program said reaches the bar."""
        if self.bar is None:
            return True
        figure = self.judged(found)
        return figure >= self.bar if self.above else figure <= self.bar


ROWS = (
    Row("codec", "int4_encode_over_memcpy", "int4 encode, over memcpy of the same f32", 0.8),
    Row("codec", "int4_decode_accumulate_over_memcpy", "int4 decode and accumulate, over memcpy", 0.8),
    Row("codec", "int8_encode_over_memcpy", "int8 encode, over memcpy", 0.8),
    Row("codec", "e3m0_encode_over_memcpy", "e3m0 encode, over memcpy", 1.1),
    Row("codec", "numba_over_torch_int4_encode", "int4 encode, times as fast as torch on one thread", 5.0, above=True),
    Row("merge", "fused4_over_memcpy", "merge of 4, outer step and publication, over memcpy", 2.4),
    Row("merge", "three_vectors_over_memcpy", "(only copying the three vectors that it changes)"),
    Row("merge", "rda4_over_plain4", "merge of 4 by RDA, over by the mean", 2.5),
    Row("merge", "fused4_threads_speedup", "merge of 4 on all cores, times as fast as on one"),
    Row("merge", "peak_memory_m16_over_m2", "peak memory of merging 16, over 2", 1.15),
    Row("stall", "stall_over_step", "training stands still for the exchange, share of a step", 0.02),
    Row("transport", "grpc_over_raw_tcp", "gRPC's rate, over bare TCP's", 0.6, above=True),
    Row("transport", "bare_grpc_over_raw_tcp", "(grpc.aio by itself, over bare TCP's)"),
    Row("transport", "tls_over_plain", "encrypted, over plain", 0.6, above=True),
    Row("transport", "cpu_s_per_gib", "transport, both ends, processor s a GiB", 1.0),
    Row("transport", "bare_grpc_cpu_s_per_gib", "(grpc.aio by itself)"),
    Row("transport", "tls_cpu_s_per_gib", "the same encrypted"),
    Row("syncer", "cpu_s_per_gib_ingress", "syncer with merges of 4, processor s a GiB of uplink", 1.2),
    Row("syncer", "cpu_per_byte_m32_over_m4", "the same a byte, 32 learners over 4", 1.1),
    Row("syncer", "loop_callback_cpu_ms_max", "the syncer's longest callback, processor ms", 2.0),
    Row("syncer", "peak_rss_m16_over_m2", "the syncer's peak memory, 16 learners over 2", 1.15),
    Row("syncer", "bits_both_ways", "bits a parameter and merge, both ways, a real run", 7.5),
    Row("restart", "serves_again_s", "a killed syncer with a 100 MB model serves again, s", 5.0),
    Row("restart", "reconnect_s_max", "from its port being open until the last of 8 learners is back, s", 5.0),
    Row("restart", "reconnected_at_once_max", "share of them that come back within the same 100 ms", 0.5),
    Row("rejoin", "rejoin_over_bare", "a killed learner trains again, over the bare time of what it is owed", 1.5),
    Row("pacing", "mean_over_cap", "long transfer, over its cap", 0.97, above=True),
    Row("pacing", "window_over_allowed_max", "fullest 100 ms, over what the cap allows", 1.0),
    Row("pacing", "heartbeat_p99_ms", "control message there and back on a full link, p99 ms", 100.0),
    Row("pacing", "peak_over_mean_demo", "fullest step's traffic over the mean, the demo's model", 1.4),
    Row("pacing", "peak_over_mean_64m", "the same, 64M parameters", 1.4),
    Row(
        "pacing", "peak_over_at_once", "fullest step's traffic, times below sending the model at once", 12.0, above=True
    ),
    Row(
        "chaos",
        "longest_standstill_s",
        "five minutes of faults: longest without a published round, s",
        15.0,
        worst=True,
    ),
    Row("chaos", "never_well", "five minutes of faults: faults that it didn't recover from", 0.0),
    Row("chaos", "double_merges", "five minutes of faults: merged twice", 0.0),
    Row("chaos", "repeated_units", "five minutes of faults: units of data merged twice", 0.0),
    Row("chaos", "lost_acknowledged", "five minutes of faults: acknowledged and lost", 0.0),
    Row("chaos", "ledger_balance", "five minutes of faults: tokens unaccounted for", 0.0),
    Row("chaos", "replayed_otherwise", "five minutes of faults: runs whose journal gives other versions", 0.0),
    Row("chaos", "loss_over_faultless", "five minutes of faults: loss, over none at as many merged tokens", 1.03),
    Row(
        "kill_one",
        "others_after_over_before_mean",
        "one of four dies: the others' speed after, over before",
        0.97,
        above=True,
    ),
    Row(
        "kill_one", "round_closed_after_s", "one of four dies: its rounds close after, beyond grace, s", 2.0, worst=True
    ),
    Row(
        "slow_regions",
        "fast_over_equal",
        "two of four three times slower: the fast ones' speed, over equals'",
        0.97,
        above=True,
    ),
    Row(
        "slow_regions",
        "periods_between_merges",
        "two of four three times slower: longest between merges, periods",
        3.0,
        worst=True,
    ),
    Row(
        "slow_regions", "loss_over_equal", "two of four three times slower: loss, over equals' at as many tokens", 1.03
    ),
)


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """What each program said."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def figures_table(results: dict[str, dict[str, Any]]) -> str:
    """A row a figure, its bar and its command; a line a machine."""
    rows = ["| | median (least to most) | bar | by |", "|---|---|---|---|"]
    for row in ROWS:
        found = results.get(row.program, {})
        figure = found.get(row.key)
        measured = "not measured" if figure is None else _spelled(found, row.key)
        missed = " (missed)" if figure is not None and not row.meets(found) else ""
        rows.append(f"| {row.says} | {measured}{missed} | {row.bar_text()} | `{command(row.program)}` |")
    machines = dict.fromkeys(machine_text(found["machine"]) for found in results.values() if "machine" in found)
    return "\n".join([*rows, "", *(f"On {text}." for text in machines)]).rstrip()


def _spelled(found: dict[str, Any], key: str) -> str:
    if f"{key}_min" not in found:
        return f"{found[key]:.3g}"
    return f"{found[key]:.3g} ({found[f'{key}_min']:.3g} to {found[f'{key}_max']:.3g})"


def command(program: str) -> str:
    """How a reader measures it."""
    return f"python bench/{program}.py{OPTIONS.get(program, '')}"


def machine_text(machine: dict[str, Any]) -> str:
    """A machine's name; not what else it did, which differs from one program to the next."""
    return f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Python {machine['python']}"


def between(text: str, name: str, new: str) -> str:
    """Replace what stands between two markers.

    Raises:
        ValueError: They aren't there once each, in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text needs {begin} and, behind it, {end}, once each")
    head, _, rest = text.partition(begin)
    tail = rest.partition(end)[2]
    return f"{head}{begin}\n{new}\n{end}{tail}"


def misses(results: dict[str, dict[str, Any]]) -> list[str]:
    """The figures that miss their bars."""
    return [
        f"{row.program}: {row.key} is {row.judged(found):.3g}, and should be {row.bar_text()}"
        for row in ROWS
        if row.key in (found := results.get(row.program, {})) and not row.meets(found)
    ]


def main() -> None:
    """Write README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--print", action="store_true", help="print the tables instead")
    chosen = parser.parse_args()
    results = load(chosen.results)
    tables = {"bench": figures_table({name: found for name, found in results.items() if name != "quality"})}
    if "quality" in results:
        tables["quality"] = quality.table(results["quality"])
    if chosen.print:
        print("\n\n".join(tables.values()))
    else:
        text = chosen.readme.read_text()
        for name, table in tables.items():
            text = between(text, name, table)
        chosen.readme.write_text(text)
    for miss in misses(results):
        print(miss, file=sys.stderr)


if __name__ == "__main__":
    main()
