"""What a chaos run came to: one JSON value for programs, lines for people, and what the run's summary gets of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from wan_diloco.lab.chaos_costs import fault_costs, longest_standstill, presence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wan_diloco.lab.chaos_storm import Befallen
    from wan_diloco.lab.chaos_watch import Observations
    from wan_diloco.lab.links import LinkCounts
    from wan_diloco.lab.tape_audit import TapeAudit

__all__ = ["CHAOS_FILE", "SCHEDULE_FILE", "chaos_report", "chaos_text", "is_sound", "summary_additions"]

CHAOS_FILE: Final = "chaos.json"
SCHEDULE_FILE: Final = "chaos-schedule.json"

# These go into summary.json, so that one file says how a run went.
_ACCOUNT: Final = ("ledger_balance", "double_merges", "repeated_units", "lost_acknowledged")
_HEADLINES: Final = ("faults", "longest_standstill_s", *_ACCOUNT)


def chaos_report(
    *,
    seed: int,
    regions: Sequence[str],
    quorum: int,
    install: str,
    befallen: Sequence[Befallen],
    seen: Observations,
    audit: TapeAudit,
    links: Mapping[str, LinkCounts],
    summary: Mapping[str, Any],
    disk: str,
    without: Mapping[str, str],
    unwatched: str = "",
) -> dict[str, Any]:
    """The content of `chaos.json`.

    Args:
        seed: Of the schedule.
        regions: Of the run, in order.
        quorum: K.
        install: How updates are installed: "overwrite" or "rebase".
        befallen: Faults, in order of time.
        seen: Of the run.
        audit: Of its whole tape.
        links: What went over each region's.
        summary: The run's own; empty when it has none.
        disk: How a full disk was had; empty when it couldn't be.
        without: Kinds of faults that this machine can't do, and why.
        unwatched: Why the run wasn't watched to its end; empty when it was.
    """
    happened = [item for item in befallen if item.began_s is not None]
    stood = longest_standstill(seen, quorum)
    in_all = longest_standstill(seen, quorum, always=True)
    started_s = seen.started_s or 0.0
    return {
        "seed": seed,
        "schedule": SCHEDULE_FILE,
        "faults": len(happened),
        "faults_by_kind": dict(sorted(Counter(f"{item.fault.kind} {item.fault.sort}" for item in happened).items())),
        "faults_that_did_not_happen": len(befallen) - len(happened),
        "without": dict(without),
        "disk": disk,
        "unwatched": unwatched,
        "quorum": quorum,
        "install": install,
        "longest_standstill_s": None if stood is None else round(stood.duration_s, 2),
        "longest_standstill_from_s": None if stood is None else round(stood.from_s - started_s, 2),
        "longest_standstill_in_all_s": None if in_all is None else round(in_all.duration_s, 2),
        "ledger_balance": summary.get("ledger_balance"),
        "double_merges": audit.double_merges,
        "repeated_units": audit.repeated_units,
        "lost_acknowledged": audit.lost_acknowledged,
        "unaccounted": audit.unaccounted,
        "audit": asdict(audit),
        "trained_s": None if seen.started_s is None or seen.ended_s is None else round(seen.ended_s - started_s, 2),
        "befallen": fault_costs(befallen, seen),
        "presence": presence(seen, len(regions)),
        "links": {name: asdict(counts) for name, counts in links.items()},
    }


def is_sound(report: Mapping[str, Any]) -> bool:
    """Whether nothing was lost or counted twice, as far as the run got; it isn't known without the run's summary."""
    # A rebasing install merges the overlap's work by two contributions, and says so.
    repeats = report["install"] == "rebase"
    zeros = (*_ACCOUNT, "unaccounted")
    return all(report[key] == 0 for key in zeros if not (repeats and key == "repeated_units"))


def summary_additions(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the run's summary gets of a report."""
    return {key: report[key] for key in _HEADLINES}


def chaos_text(report: Mapping[str, Any]) -> str:
    """A report for a person."""
    later = report["faults_that_did_not_happen"]
    stood, in_all = report["longest_standstill_s"], report["longest_standstill_in_all_s"]
    rows = {
        "faults": f"{report['faults']}, of seed {report['seed']}" + (f"; {later} more did not happen" if later else ""),
        "stood still": f"{_seconds(stood)} at most while {report['quorum']} or more could contribute; "
        f"{_seconds(in_all)} in all",
        "ledger": f"{_balance(report['ledger_balance'])}; {report['double_merges']} merged twice, "
        f"{report['repeated_units']} units of data merged twice, "
        f"{report['lost_acknowledged']} acknowledged and lost, {report['unaccounted']} unaccounted for",
    }
    if report["unwatched"]:
        rows["not watched"] = f"to the end, and no fault befell after that: {report['unwatched']}"
    lines = [f"{label:<18}{text}" for label, text in rows.items()]
    lines += [f"{'left out':<18}{kind}: {reason}" for kind, reason in report["without"].items()]
    lines += [f"    {sentence}" for sentence in report["audit"]["sentences"]]
    lines += ["", f"{'at':>8}  {'fault':<30}{'lasted':>8}{'well after':>12}{'stood still':>13}{'missed':>8}  discarded"]
    lines += [_row(item) for item in report["befallen"]]
    return "\n".join(lines)


def _balance(tokens: int | None) -> str:
    return "not known" if tokens is None else f"off by {tokens}"


def _row(item: Mapping[str, Any]) -> str:
    what = f"{item['kind']} {item['target']}"
    if item["problem"]:
        return f"{item['at_s']:7.1f}s  {what:<30}{item['problem']}"
    discarded = ", ".join(f"{reason} {tokens}" for reason, tokens in (item["tokens_discarded"] or {}).items())
    missed = "-" if item["rounds_missed"] is None else str(item["rounds_missed"])
    lasted_s = item["ended_s"] - item["began_s"]
    well, undone = _seconds(item["well_after_s"]), ""
    if item["cut_short"]:
        # Nobody was left to be well again.
        well, undone = "-", "; undone early, as the run ended"
    return (
        f"{item['began_s']:7.1f}s  {what:<30}{_seconds(lasted_s):>8}{well:>12}"
        f"{_seconds(item['standstill_s']):>13}{missed:>8}  {discarded or '-'}{undone}"
    )


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}s"
