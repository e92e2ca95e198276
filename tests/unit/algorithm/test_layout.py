"""Layouts: balanced, complete, and the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from wan_diloco.algorithm.layout import (
    Fragment,
    Layout,
    MergeRule,
    Piece,
    TensorSpec,
    build_layout,
    first_difference,
)
from wan_diloco.errors import ConfigError
from wan_diloco.units import FragmentId

TINY = [
    TensorSpec(name="embed.weight", shape=(256, 64)),
    TensorSpec(name="layers.0.up.weight", shape=(256, 64)),
    TensorSpec(name="layers.0.down.weight", shape=(64, 256)),
    TensorSpec(name="layers.0.qkv.weight", shape=(192, 64)),
    TensorSpec(name="norm.weight", shape=(64,)),
]


def equal_tensors(count, shape=(4, 32)):
    return [TensorSpec(name=f"layers.{index}.w", shape=shape) for index in range(count)]


def sizes(layout, unit):
    return [fragment.numel // unit for fragment in layout.fragments]


@pytest.mark.parametrize("rule", MergeRule)
def test_whole_tensors_go_biggest_first_to_the_emptiest_fragment(vectors, rule):
    case = vectors["lpt_fragments"]
    specs = [TensorSpec(name=f"t{i}", shape=(size // 4,)) for i, size in enumerate(case["bytes"])]
    layout = build_layout(specs, num_fragments=case["P"], merge=rule)
    assert [4 * fragment.numel for fragment in layout.fragments] == case["loads"]
    members = [[int(piece.tensor[1:]) for piece in fragment.pieces] for fragment in layout.fragments]
    assert members == case["members"]


@pytest.mark.parametrize("rule", MergeRule)
def test_equal_tensors_are_spread_evenly_and_no_fragment_is_empty(vectors, rule):
    for case in vectors["partition_sizes"]:
        layout = build_layout(equal_tensors(case["equal_tensors"]), num_fragments=case["P"], merge=rule)
        assert sorted(sizes(layout, 128), reverse=True) == case["sizes"]
    many = sizes(build_layout(equal_tensors(38), num_fragments=8, merge=rule), 128)
    assert sum(many) == 38
    assert max(many) - min(many) <= 1


def test_two_processes_with_different_hash_seeds_make_the_same_layout():
    script = (
        "from wan_diloco.algorithm.layout import *\n"
        "for count, parts in ((5, 4), (10, 3), (38, 8)):\n"
        "    specs = {TensorSpec(name=f'layers.{i}.w', shape=(4, 32)) for i in range(count)}\n"
        "    layout = build_layout(specs, num_fragments=parts, merge=MergeRule.RDA)\n"
        "    print(layout.fingerprint(), *layout.lines(), sep='\\n')\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count(b"\n") == 3 + 5 + 10 + 38


def test_layout_does_not_depend_on_the_order_of_the_tensors():
    one = build_layout(TINY, num_fragments=4, merge=MergeRule.RDA)
    other = build_layout(reversed(TINY), num_fragments=4, merge=MergeRule.RDA)
    assert one == other
    assert one.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("rule", MergeRule)
@pytest.mark.parametrize("parts", [2, 5, 24])
def test_large_tensors_are_split_by_rows_so_that_no_fragment_dwarfs_the_others(rule, parts):
    layout = build_layout(TINY, num_fragments=parts, merge=rule)
    mean = layout.num_parameters / parts
    assert layout.num_fragments == parts
    assert max(fragment.numel for fragment in layout.fragments) <= 4 / 3 * mean
    for fragment in layout.fragments:
        assert len({piece.tensor for piece in fragment.pieces}) == len(fragment.pieces)
        for piece in fragment.pieces:
            assert piece.start % piece.row_length == piece.stop % piece.row_length == 0


def test_an_rda_tensor_is_split_only_above_four_thirds_of_the_mean_fragment():
    # Mean fragment 120 rows: 160 rows are exactly 4/3 of it, 161 more.
    def pieces(rows):
        specs = [
            TensorSpec(name="big", shape=(rows, 8)),
            *(TensorSpec(name=f"s{i}", shape=(1, 8)) for i in range(240 - rows)),
        ]
        layout = build_layout(specs, num_fragments=2, merge=MergeRule.RDA)
        return sum(piece.tensor == "big" for fragment in layout.fragments for piece in fragment.pieces)

    assert pieces(160) == 1
    assert pieces(161) == 2


def test_embeddings_take_the_plain_mean_where_the_rest_takes_rda():
    layout = build_layout(TINY, num_fragments=1, merge=MergeRule.RDA)
    rules = {piece.tensor: piece.rule for piece in layout.fragments[0].pieces}
    assert rules.pop("embed.weight") is MergeRule.MEAN
    assert set(rules.values()) == {MergeRule.RDA}
    plain = build_layout(TINY, num_fragments=1, merge=MergeRule.RDA, mean_patterns=())
    assert {piece.rule for piece in plain.fragments[0].pieces} == {MergeRule.RDA}


def test_too_few_rows_make_fewer_fragments_and_none_is_empty():
    specs = [TensorSpec(name="a", shape=(7,)), TensorSpec(name="b", shape=(2, 3)), TensorSpec(name="c", shape=())]
    layout = build_layout(specs, num_fragments=24, merge=MergeRule.MEAN)
    assert layout.num_fragments == 4
    assert layout.num_parameters == 14
    assert min(fragment.numel for fragment in layout.fragments) > 0


def test_bytes_rather_than_elements_are_balanced():
    specs = [
        TensorSpec(name="double", shape=(100,), dtype="float64"),
        TensorSpec(name="half", shape=(100,), dtype="bfloat16"),
        TensorSpec(name="half2", shape=(300,), dtype="bfloat16"),
    ]
    layout = build_layout(specs, num_fragments=2, merge=MergeRule.MEAN)
    assert [[piece.tensor for piece in fragment.pieces] for fragment in layout.fragments] == [
        ["double"],
        ["half", "half2"],
    ]


def test_a_line_says_everything_about_a_piece():
    layout = build_layout([TensorSpec(name="embed.weight", shape=(256, 64))], num_fragments=2, merge=MergeRule.RDA)
    assert layout.lines() == (
        "embed.weight[0:8192] float32 (256,64) fragment=0 rule=mean",
        "embed.weight[8192:16384] float32 (256,64) fragment=1 rule=mean",
    )


@pytest.mark.parametrize(
    "changed",
    [
        [*TINY[:-1], TensorSpec(name="norm.scale", shape=(64,))],
        [*TINY[:-1], TensorSpec(name="norm.weight", shape=(64, 1))],
        [*TINY[:-1], TensorSpec(name="norm.weight", shape=(64,), dtype="bfloat16")],
    ],
    ids=["name", "shape", "dtype"],
)
def test_fingerprint_covers_names_shapes_and_types_not_only_sizes(changed):
    mine = build_layout(TINY, num_fragments=1, merge=MergeRule.RDA)
    theirs = build_layout(changed, num_fragments=1, merge=MergeRule.RDA)
    assert mine.num_parameters == theirs.num_parameters
    assert mine.fingerprint() != theirs.fingerprint()
    assert "norm" in first_difference(mine.lines(), theirs.lines())


def test_fingerprint_covers_merge_rules_and_the_fragment_map():
    layouts = [
        build_layout(TINY, num_fragments=parts, merge=rule)
        for parts in (1, 2)
        for rule in (MergeRule.MEAN, MergeRule.RDA)
    ]
    assert len({layout.fingerprint() for layout in layouts}) == 4
    assert first_difference(layouts[0].lines(), layouts[1].lines()) == (
        "we have 'layers.0.down.weight[0:16384] float32 (64,256) fragment=0 rule=mean', "
        "they have 'layers.0.down.weight[0:16384] float32 (64,256) fragment=0 rule=rda'"
    )


def test_first_difference_names_a_tensor_that_one_side_lacks():
    mine = build_layout(TINY, num_fragments=2, merge=MergeRule.MEAN).lines()
    theirs = build_layout(TINY[1:], num_fragments=2, merge=MergeRule.MEAN).lines()
    assert first_difference(mine, mine) is None
    assert first_difference(mine, theirs) == "they lack tensor embed.weight, which we have"
    assert first_difference(theirs, mine) == "they have tensor embed.weight, which we lack"
    assert first_difference(mine, (*mine, mine[-1])) == f"we have {len(mine)} pieces, they have {len(mine) + 1}"


@pytest.mark.parametrize(
    ("specs", "parts", "where"),
    [
        ([], 1, "model"),
        (TINY, 0, "sync.fragments"),
        ([*TINY, TINY[0]], 2, "embed.weight"),
        ([TensorSpec(name="none", shape=(0, 4))], 1, "none"),
        ([TensorSpec(name="odd", shape=(4,), dtype="floaty")], 1, "odd"),
    ],
    ids=["no tensors", "no fragments", "same name", "no elements", "unknown dtype"],
)
def test_what_no_layout_can_be_made_of_is_refused_by_name(specs, parts, where):
    with pytest.raises(ConfigError) as caught:
        build_layout(specs, num_fragments=parts, merge=MergeRule.MEAN)
    assert caught.value.where == where


def piece(start, stop, tensor="a"):
    return Piece(tensor=tensor, start=start, stop=stop, row_length=1, rule=MergeRule.MEAN)


@pytest.mark.parametrize(
    "pieces",
    [
        (piece(0, 3),),
        (piece(0, 2), piece(3, 4)),
        (piece(0, 3), piece(2, 4)),
        (piece(1, 4),),
        (piece(0, 4, "b"),),
    ],
    ids=["end dropped", "gap", "overlap", "start dropped", "foreign tensor"],
)
def test_a_layout_that_drops_or_doubles_an_element_cannot_be_built(pieces):
    fragment = Fragment(fragment_id=FragmentId(0), pieces=pieces, numel=sum(each.numel for each in pieces))
    with pytest.raises(ValueError, match=r"tensors|exactly once"):
        Layout(tensors=(TensorSpec(name="a", shape=(4, 1)),), fragments=(fragment,))


def test_a_fragment_with_a_wrong_id_or_size_cannot_be_in_a_layout():
    for fragment_id, numel in ((1, 4), (0, 5)):
        fragment = Fragment(fragment_id=FragmentId(fragment_id), pieces=(piece(0, 4),), numel=numel)
        with pytest.raises(ValueError, match="wrong id or size"):
            Layout(tensors=(TensorSpec(name="a", shape=(4, 1)),), fragments=(fragment,))
