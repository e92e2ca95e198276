"""What faults cost, on invented observations whose answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from wan_diloco.config import FaultSettings
from wan_diloco.lab.chaos_costs import fault_costs, longest_standstill, presence
from wan_diloco.lab.chaos_report import chaos_report, chaos_text, is_sound, summary_additions
from wan_diloco.lab.chaos_storm import Befallen
from wan_diloco.lab.chaos_watch import Merged, Observations, Sample
from wan_diloco.lab.links import LinkCounts
from wan_diloco.lab.tape_audit import TapeAudit
from wan_diloco.telemetry.report.faults import faults_part

BOTH = frozenset({"east", "west"})


def sample(seen_s: float, able: frozenset[str] = BOTH, alive: frozenset[str] = BOTH) -> Sample:
    return Sample(seen_s=seen_s, alive=alive, training=able, able=able)


def merged(seen_s: float, **fresh: float) -> Merged:
    return Merged(seen_s=seen_s, round_id=int(10 * seen_s), fragment=0, fresh=fresh)


def fault(**settings: Any) -> FaultSettings:
    return FaultSettings.model_validate({"at": "0s", **settings})


KILLED = (Befallen(fault=fault(kind="kill", target="learner:east"), began_s=103.0, ended_s=103.0),)


def seen(*rounds: Merged, samples: tuple[Sample, ...] = ()) -> Observations:
    return Observations(started_s=100.0, ended_s=160.0, merged=list(rounds), samples=list(samples))


def test_standing_still_counts_only_while_a_quorum_could_contribute() -> None:
    nobody: frozenset[str] = frozenset()
    found = seen(
        merged(102.0),
        merged(130.0),
        merged(159.0),
        samples=(
            *(sample(100.0 + second) for second in range(12)),
            *(sample(112.0 + second, nobody) for second in range(30)),
            *(sample(142.0 + second) for second in range(19)),
        ),
    )
    stood = longest_standstill(found, quorum=1)
    assert stood is not None
    assert (stood.from_s, stood.to_s) == (142.0, 159.0), "from when somebody was able to the next publication"
    in_all = longest_standstill(found, quorum=1, always=True)
    assert in_all is not None
    assert (in_all.from_s, in_all.to_s) == (130.0, 159.0)
    assert longest_standstill(found, quorum=3) is None
    assert longest_standstill(Observations(), quorum=1) is None


def test_time_until_the_first_round_and_after_the_last_is_standing_still_too() -> None:
    found = seen(merged(120.0), samples=tuple(sample(100.0 + second) for second in range(61)))
    stood = longest_standstill(found, quorum=2)
    assert stood is not None
    assert (stood.from_s, stood.to_s) == (120.0, 160.0)


def test_a_region_is_well_when_work_that_came_after_the_fault_is_merged() -> None:
    found = seen(
        merged(105.0, east=104.0, west=104.5),
        merged(109.0, east=106.0, west=108.5),  # east's had come before the fault's end
        merged(111.0, west=110.5),
        merged(114.0, east=113.5, west=113.5),
        samples=tuple(sample(100.0 + second) for second in range(61)),
    )
    found.discards += [(104.0, {"late": 10.0}), (107.0, {"late": 10.0}), (115.0, {"late": 35.0, "crashed": 4.0})]
    item = Befallen(fault=fault(kind="cut", target="link:east", **{"for": "3s"}), began_s=105.0, ended_s=108.0)
    (cost,) = fault_costs([item], found)
    assert (cost["began_s"], cost["ended_s"], cost["well_after_s"]) == (5.0, 8.0, 6.0)
    assert cost["standstill_s"] == 4.0
    assert cost["rounds_missed"] == 1
    assert cost["tokens_discarded"] == {"crashed": 4, "late": 25}


def test_a_syncer_is_well_when_all_who_were_able_are_merged_again() -> None:
    found = seen(
        merged(105.0, east=104.0, west=104.0),
        merged(118.0, east=117.0),
        merged(119.0, east=118.5, west=117.5),
        samples=tuple(sample(100.0 + second) for second in range(61)),
    )
    item = Befallen(fault=fault(kind="kill", target="syncer"), began_s=106.0, ended_s=106.0)
    never = Befallen(fault=fault(kind="kill", target="syncer"), began_s=130.0, ended_s=130.0)
    unmet = Befallen(fault=fault(kind="kill", target="learner:east"), problem="there was no process for 20 s")
    due = Befallen(fault=fault(kind="kill", target="learner:east"))
    costs = fault_costs([item, never, unmet, due], found)
    assert [cost.get("well_after_s") for cost in costs[:2]] == [13.0, None]
    assert costs[0]["rounds_missed"] is None
    assert costs[0]["tokens_discarded"] is None, "the syncer said nothing near"
    assert costs[2]["problem"] == "there was no process for 20 s"
    assert costs[3]["problem"] == "the run was over before"


def test_a_fault_that_the_end_undid_is_neither_well_nor_never_well() -> None:
    item = Befallen(
        fault=fault(kind="cut", target="link:east", **{"for": "30s"}), began_s=150.0, ended_s=160.0, cut_short=True
    )
    (cost,) = fault_costs([item], seen(merged(151.0, east=150.5)))
    assert (cost["cut_short"], cost["well_after_s"]) == (True, None)
    report = reported(TapeAudit(), {"ledger_balance": 0}, befallen=[item])
    row = chaos_text(report).splitlines()[-1]
    assert "10.0s" in row
    assert "never" not in row
    assert row.endswith("; undone early, as the run ended")
    assert "10 s, undone early, as the run ended" in str(faults_part(report))


def test_alive_training_and_averaged_are_told_apart() -> None:
    east = frozenset({"east"})
    found = seen(
        merged(101.0, east=100.5, west=100.5),
        merged(106.0, east=105.5),
        samples=(sample(100.0), sample(102.0, east), sample(106.0, east, east), sample(170.0)),
    )
    assert presence(found, 2) == [
        {"from_s": 0.0, "regions": 2, "alive": 2.0, "training": 1.5, "averaged": 2},
        {"from_s": 5.0, "regions": 2, "alive": 1.0, "training": 1.0, "averaged": 1},
    ]
    assert presence(Observations(), 2) == []


def reported(
    audit: TapeAudit, summary: dict[str, Any], install: str = "overwrite", befallen: Sequence[Befallen] = KILLED
) -> dict[str, Any]:
    found = seen(merged(105.0, east=104.0), samples=tuple(sample(100.0 + second) for second in range(61)))
    return chaos_report(
        seed=5,
        regions=("east", "west"),
        quorum=1,
        install=install,
        befallen=befallen,
        seen=found,
        audit=audit,
        links={"east": LinkCounts(up_bytes=7)},
        summary=summary,
        disk="",
        without={"full-disk": "only root may"},
    )


@pytest.mark.parametrize("wrong", ["", "double", "lost", "balance", "repeated"])
def test_a_report_says_the_same_to_programs_and_people(wrong: str) -> None:
    audit = TapeAudit(
        double_merges=int(wrong == "double"),
        lost_acknowledged=int(wrong == "lost"),
        repeated_units=int(wrong == "repeated"),
    )
    report = reported(audit, {"ledger_balance": int(wrong == "balance")})
    assert is_sound(report) == (not wrong)
    assert summary_additions(report) == {
        "faults": 1,
        "longest_standstill_s": 55.0,
        "ledger_balance": int(wrong == "balance"),
        "double_merges": int(wrong == "double"),
        "repeated_units": int(wrong == "repeated"),
        "lost_acknowledged": int(wrong == "lost"),
    }
    text = chaos_text(report)
    assert f"{int(wrong == 'repeated')} units of data merged twice" in text
    assert "kill learner:east" in text
    assert "full-disk: only root may" in text
    assert "55.0s" in text


def test_work_that_an_install_keeps_is_merged_again_and_nothing_is_known_without_a_summary() -> None:
    assert is_sound(reported(TapeAudit(repeated_units=3), {"ledger_balance": 0}, install="rebase"))
    without = reported(TapeAudit(), {})
    assert not is_sound(without)
    assert "ledger            not known" in chaos_text(without)
