"""The account that chaos keeps of a tape: a sound tape is sound, and every planted mistake is found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from wan_diloco.lab.tape_audit import TapeAudit, audit_tape


def key(step_lo: int, learner: str = "east", incarnation: int = 1, fragment: int = 0) -> dict[str, Any]:
    return {"learner_id": learner, "incarnation": incarnation, "fragment_id": fragment, "step_lo": step_lo}


def header(step_lo: int, step_hi: int, base: int = 0, **more: Any) -> dict[str, Any]:
    return {"key": key(step_lo, **more), "step_hi": step_hi, "base": version(base)}


def version(count: int, epoch: int = 0) -> dict[str, int]:
    return {"epoch": epoch, "count": count}


def journalled(*of: int, **more: Any) -> dict[str, Any]:
    return {"type": "ContributionJournalled", "header": header(*of, **more)}


def discarded(*of: int, reason: str = "stale_base", **more: Any) -> dict[str, Any]:
    return {"type": "ContributionDiscarded", "header": header(*of, **more), "reason": reason}


def closed(round_id: int, from_count: int, *headers: dict[str, Any], fragment: int = 0) -> dict[str, Any]:
    return {
        "type": "RoundClosed",
        "round_id": round_id,
        "fragment_id": fragment,
        "from_version": version(from_count),
        "to_version": version(from_count + 1),
        "entries": [{"header": item, "staleness": 0} for item in headers],
    }


def published(round_id: int, count: int, fragment: int = 0) -> dict[str, Any]:
    return {"type": "FragmentPublished", "round_id": round_id, "fragment_id": fragment, "version": version(count)}


ENDED = {"type": "RunEnded", "global_step": 10, "reason": "the last step is reached"}


def audit(*records: dict[str, Any]) -> TapeAudit:
    return audit_tape(json.dumps(record).encode() for record in records)


def lost(round_id: int, *keys: dict[str, Any], opened_anew: bool = False) -> dict[str, Any]:
    return {
        "type": "ContributionsLost",
        "round_id": round_id,
        "fragment_id": 0,
        "keys": list(keys),
        "opened_anew": opened_anew,
    }


def test_what_cannot_be_read_is_missed_and_may_come_again_in_a_larger_one() -> None:
    found = audit(
        {"type": "SyncerStarted"},
        journalled(0, 3),
        journalled(0, 4, learner="west"),
        closed(1, 0, header(0, 3), header(0, 4, learner="west")),
        lost(1, key(0)),
        published(1, 1),
        journalled(3, 5, 1),
        closed(2, 1, header(3, 5, 1)),
        lost(2, key(3), opened_anew=True),
        journalled(3, 7, 1),
        closed(3, 1, header(3, 7, 1)),
        published(3, 2),
        ENDED,
    )
    assert (found.double_merges, found.lost_acknowledged, found.unaccounted) == (0, 0, 0), found.sentences
    assert (found.merged, found.published, found.discarded) == (2, 2, {"unreadable": 2})
    assert audit(journalled(0, 3), closed(1, 0, header(0, 3)), lost(1, key(9))).unaccounted == 1


def test_what_a_round_that_is_opened_anew_has_left_waits_for_the_next() -> None:
    found = audit(
        {"type": "SyncerStarted"},
        journalled(0, 3),
        journalled(0, 4, learner="west"),
        closed(1, 0, header(0, 3), header(0, 4, learner="west")),
        lost(1, key(0), opened_anew=True),
        journalled(0, 5, learner="west"),
        closed(2, 0, header(0, 5, learner="west")),
        published(2, 1),
        ENDED,
    )
    assert (found.double_merges, found.lost_acknowledged, found.unaccounted) == (0, 0, 0), found.sentences
    assert (found.merged, found.replaced, found.discarded) == (1, 1, {"unreadable": 1})


def test_a_new_epoch_discards_what_was_not_merged_and_goes_on_from_the_same_counts() -> None:
    found = audit(
        {"type": "SyncerStarted", "epoch": 0},
        journalled(0, 3),
        closed(1, 0, header(0, 3)),
        published(1, 1),
        journalled(3, 5, 1),
        closed(2, 1, header(3, 5, 1)),
        journalled(0, 4, learner="west"),
        {"type": "SyncerStarted", "epoch": 1},
        {**closed(3, 1), "from_version": version(1, 1), "to_version": version(2, 1)},
        {**published(3, 2), "version": version(2, 1)},
        ENDED,
    )
    assert (found.double_merges, found.lost_acknowledged, found.unaccounted) == (0, 0, 0), found.sentences
    assert found.discarded == {"syncer_lost": 2}
    assert found.terms == 2


def test_a_sound_tape_is_sound_and_everything_acknowledged_has_its_fate() -> None:
    found = audit(
        {"type": "SyncerStarted"},
        journalled(0, 3),
        journalled(0, 5),  # a larger snapshot of the same work
        journalled(0, 5),  # counted for a newer attempt
        journalled(0, 4, learner="west"),
        closed(1, 0, header(0, 5), header(0, 4, learner="west")),
        published(1, 1),
        {"type": "SyncerStarted"},
        journalled(5, 9, 1),
        closed(2, 1, header(5, 9, 1)),
        published(2, 2),
        journalled(4, 6, learner="west"),
        discarded(4, 6, learner="west"),
        journalled(9, 10, 2),
        ENDED,
    )
    assert (found.acknowledged, found.merged, found.replaced) == (6, 3, 1)
    assert found.discarded == {"stale_base": 1, "run_ended": 1}
    assert found.acknowledged == found.merged + found.replaced + sum(found.discarded.values()) + found.outstanding
    assert (found.double_merges, found.lost_acknowledged, found.unaccounted) == (0, 0, 0)
    assert (found.terms, found.rounds, found.published, found.ended) == (2, 2, 2, True)
    assert found.sentences == []


@pytest.mark.parametrize(
    ("records", "counts"),
    [
        pytest.param(
            [
                journalled(0, 5),
                closed(1, 0, header(0, 5)),
                published(1, 1),
                closed(2, 1, header(0, 5)),
                published(2, 2),
            ],
            (1, 0, 1),
            id="the same work in two rounds",
        ),
        pytest.param(
            [
                journalled(0, 5),
                closed(1, 0, header(0, 5)),
                published(1, 1),
                journalled(3, 7, 1),
                closed(2, 1, header(3, 7, 1)),
                published(2, 2),
            ],
            (1, 0, 1),
            id="overlapping steps under another key",
        ),
        pytest.param(
            [journalled(0, 5), journalled(0, 4, learner="west"), closed(1, 0, header(0, 5)), published(1, 1)],
            (0, 1, 0),
            id="passed over though it could be merged",
        ),
        pytest.param([journalled(0, 5), closed(1, 0, header(0, 5)), ENDED], (0, 1, 0), id="closed and never published"),
        pytest.param([journalled(0, 5), journalled(0, 4)], (0, 1, 0), id="replaced by less"),
        pytest.param([closed(1, 0, header(0, 5)), published(1, 1)], (0, 0, 1), id="merged and never journalled"),
        pytest.param(
            [journalled(0, 5), closed(1, 0, header(0, 6)), published(1, 1)], (0, 0, 1), id="merged with more steps"
        ),
        pytest.param([published(1, 1)], (0, 0, 1), id="published and never closed"),
        pytest.param([closed(1, 0), published(1, 2)], (0, 0, 1), id="a version is left out"),
        pytest.param([closed(1, 0), published(1, 1), closed(2, 0)], (0, 0, 1), id="merged into an old version"),
        pytest.param([closed(1, 0), published(1, 1), closed(1, 1)], (0, 0, 1), id="a round number comes twice"),
        pytest.param([discarded(0, 5)], (0, 0, 1), id="discarded out of nowhere"),
    ],
)
def test_each_mistake_is_found_and_said(records: list[dict[str, Any]], counts: tuple[int, int, int]) -> None:
    found = audit(*records)
    assert (found.double_merges, found.lost_acknowledged, found.unaccounted) == counts
    assert len(found.sentences) >= sum(counts) > 0


def test_what_a_close_named_and_could_not_be_merged_is_discarded_and_may_come_again() -> None:
    found = audit(
        journalled(0, 5),
        closed(1, 0, header(0, 5)),
        discarded(0, 5, reason="unreadable"),
        published(1, 1),
    )
    assert (found.merged, found.discarded) == (0, {"unreadable": 1})
    assert (found.double_merges, found.lost_acknowledged, found.unaccounted) == (0, 0, 0)


def test_a_tape_that_stops_in_the_middle_leaves_work_open_and_a_torn_line_is_counted() -> None:
    lines = [json.dumps(journalled(0, 5)).encode(), json.dumps(closed(1, 0, header(0, 5))).encode(), b'{"type": "Fra']
    found = audit_tape(lines)
    assert (found.outstanding, found.lost_acknowledged, found.damaged_lines) == (1, 0, 1)


def admitted(learner: str, incarnation: int, shard: int) -> dict[str, Any]:
    return {"type": "LearnerAdmitted", "learner_id": learner, "incarnation": incarnation, "shard": shard}


def read_up_to(unit_hi: int, item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "unit_hi": unit_hi}


@pytest.mark.parametrize(("first_unit", "repeated"), [(4, 0), (3, 1), (0, 4)])
def test_units_of_data_that_are_merged_for_the_second_time_are_counted(first_unit: int, repeated: int) -> None:
    """West goes on with the data of east, which had units 0 to 3 merged."""
    east = read_up_to(4, header(0, 4))
    west = read_up_to(first_unit + 5, header(0, 5, 1, learner="west"))
    found = audit(
        admitted("east", 1, 2),
        {"type": "ContributionJournalled", "header": east},
        closed(1, 0, east),
        published(1, 1),
        admitted("west", 1, 2),
        {"type": "ContributionJournalled", "header": west},
        closed(2, 1, west),
        published(2, 2),
    )
    assert found.repeated_units == repeated
    assert len(found.sentences) == (repeated > 0)


def test_units_of_work_that_could_not_be_merged_may_come_again() -> None:
    """East's can't be read; who has its data next reads it for the first time, as far as the model knows."""
    east, west = read_up_to(4, header(0, 4)), read_up_to(4, header(0, 4, learner="west"))
    found = audit(
        admitted("east", 1, 2),
        {"type": "ContributionJournalled", "header": east},
        closed(1, 0, east),
        lost(1, key(0)),
        admitted("west", 1, 2),
        {"type": "ContributionJournalled", "header": west},
        closed(2, 0, west),
        published(2, 1),
    )
    assert (found.repeated_units, found.sentences) == (0, [])


def test_the_same_numbers_of_other_data_are_other_units() -> None:
    east, west = read_up_to(4, header(0, 4)), read_up_to(4, header(0, 4, learner="west"))
    found = audit(
        admitted("east", 1, 0),
        admitted("west", 1, 1),
        {"type": "ContributionJournalled", "header": east},
        {"type": "ContributionJournalled", "header": west},
        closed(1, 0, east, west),
        published(1, 1),
    )
    assert found.repeated_units == 0
