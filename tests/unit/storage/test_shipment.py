"""Manifests: their order, their digests, and whose an object is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_diloco.errors import CheckpointError
from wan_diloco.storage import Manifest, ShippedFile, manifest_names
from wan_diloco.storage.shipment import is_ours, journal_name, manifest_name, snapshot_name_of

NUMBERS = st.integers(0, 10**14)
FILES = st.builds(
    ShippedFile,
    path=st.text(max_size=20),
    name=st.text(max_size=20),
    size_bytes=NUMBERS,
    digest=st.text(alphabet="0123456789abcdef", max_size=32),
)
MANIFESTS = st.builds(
    Manifest,
    term=NUMBERS,
    number=NUMBERS,
    owner=st.text(max_size=20),
    snapshot=st.text(max_size=20),
    files=st.lists(FILES, max_size=3).map(tuple),
)


@given(MANIFESTS)
def test_a_manifest_comes_back_as_it_was(manifest):
    assert Manifest.decode(manifest.encode(), manifest.object_name) == manifest


@given(MANIFESTS, st.data())
def test_a_manifest_of_which_a_bit_was_turned_is_refused_or_the_same(manifest, data):
    encoded = bytearray(manifest.encode())
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = Manifest.decode(bytes(encoded), manifest.object_name)
    except CheckpointError:
        return
    # A space for a tab, say: JSON has more than one way to write the same.
    assert found == manifest


@given(MANIFESTS, st.data())
def test_a_manifest_that_was_cut_short_is_refused(manifest, data):
    encoded = manifest.encode().rstrip()
    with pytest.raises(CheckpointError):
        Manifest.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))], manifest.object_name)


def test_a_manifest_under_anothers_name_is_refused():
    manifest = Manifest(term=1, number=2, owner="a", snapshot="state-1", files=())
    with pytest.raises(CheckpointError, match="holds the manifest"):
        Manifest.decode(manifest.encode(), manifest_name(1, 3))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), unique=True), st.randoms())
def test_the_newest_manifest_is_that_of_the_highest_term_and_then_number(places, rng):
    names = [manifest_name(term, number) for term, number in places]
    rng.shuffle(names)
    found = manifest_names([*names, "lock.json", "manifests/else.json", journal_name(1, "0000000001.journal")])
    assert found == [manifest_name(term, number) for term, number in sorted(places, reverse=True)]


@given(NUMBERS, NUMBERS)
def test_a_syncer_counts_as_its_own_what_its_term_or_an_earlier_one_wrote(term, other):
    for name in (
        manifest_name(other, 3),
        journal_name(other, "0000000001.journal"),
        snapshot_name_of(other, "state-1", "manifest.json"),
    ):
        assert is_ours(name, term) == (other <= term)
    for name in ("lock.json", "owner.lock", "notes/t0000000001-a", "manifests/t1-0000000001.json"):
        assert not is_ours(name, term)
