"""Stories about the machines, each with the log that it must leave: read them, they are short.

`--update-golden` writes the logs anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.transcript import play_story
from tests.support.golden import Golden

FOLDER = Path(__file__).parent
STORIES = sorted(path.name for path in FOLDER.glob("*.txt"))


@pytest.mark.parametrize("name", STORIES)
def test_the_story_goes_as_it_is_told(name: str, request: pytest.FixtureRequest) -> None:
    update = bool(request.config.getoption("--update-golden"))
    Golden(FOLDER, update=update).check(name, play_story((FOLDER / name).read_text()))


def test_there_are_stories() -> None:
    assert len(STORIES) >= 6
