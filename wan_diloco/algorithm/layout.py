"""Which elements of which tensors make up each fragment, the same on every machine.

A layout depends only on the set of tensors and the arguments: not on the order in which a model lists
its parameters, on hashes, or on the process. Both ends of a connection compare `Layout.fingerprint`.
This module never sees a value, and does without torch, so that planning tools can do without it too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby, pairwise
from typing import Final

from wan_diloco.errors import ConfigError
from wan_diloco.units import FragmentId

__all__ = [
    "DEFAULT_MEAN_PATTERNS",
    "Fragment",
    "Layout",
    "MergeRule",
    "Piece",
    "TensorSpec",
    "build_layout",
    "first_difference",
    "row_length",
]

# Embeddings and an untied output layer: their outer gradients aren't near-orthogonal (algorithm
# papers average them directly), so they take the plain mean also where everything else takes RDA.
DEFAULT_MEAN_PATTERNS: Final = ("*embed*", "*wte*", "*wpe*", "*lm_head*")

# Changes whenever the meaning of a line, or of the blocks cut from it, changes.
_FORMAT: Final = "wan_diloco layout 1: blocks of 128, flat below rows of 32"

# Bytes an element of the types that parameters may have.
_ITEM_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

# A split mean-rule tensor is cut finely, since its pieces merge independently and are joined again.
_MEAN_CUT: Final = 8
_RDA_CUTS: Final = (1, 2, 4, 8)


class MergeRule(StrEnum):
    """How the learners' deltas of one piece become one delta."""

    MEAN = "mean"
    RDA = "rda"


def row_length(shape: Sequence[int]) -> int:
    """Elements in one row: a slice of the first dimension; a tensor of fewer than two dimensions is one row."""
    return math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What is known of a tensor without its values.

    Attributes:
        name: Canonical name (`parameters.canonical_name`).
        shape: Whole shape, whatever part of it a rank holds.
        dtype: torch's name of the type, without `torch.`: "float32".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Rows into which it may be split."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def size_bytes(self) -> int:
        """Bytes of its values in its own type.

        Raises:
            ConfigError: Parameters can't have that type.
        """
        if self.dtype not in _ITEM_BYTES:
            raise ConfigError(f"{self.dtype!r} isn't a type of parameters", where=self.name)
        return self.numel * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Whole rows of one tensor, merged by one rule; the granularity of RDA.

    Attributes:
        tensor: Name of the tensor.
        start: First element, an offset into the flattened tensor.
        stop: One past the last element.
        row_length: Elements a row.
        rule: How its deltas are merged.
    """

    tensor: str
    start: int
    stop: int
    row_length: int
    rule: MergeRule

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """What is merged, sent and installed as one: its pieces, in order, as one flat vector of f32.

    Attributes:
        fragment_id: 0 to P-1.
        pieces: In the order of their elements in the flat vector; at most one a tensor.
        numel: Elements of all pieces.
    """

    fragment_id: FragmentId
    pieces: tuple[Piece, ...]
    numel: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All fragments; each element of each tensor is in exactly one.

    Attributes:
        tensors: Sorted by name.
        fragments: Sorted by id, none empty; their number is the effective P.
    """

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]

    def __post_init__(self) -> None:
        """Refuse a layout that drops an element or holds one twice."""
        pieces = sorted(
            (piece for fragment in self.fragments for piece in fragment.pieces), key=lambda p: (p.tensor, p.start)
        )
        covered = {name: list(group) for name, group in groupby(pieces, key=lambda p: p.tensor)}
        if set(covered) != {spec.name for spec in self.tensors} or len(covered) != len(self.tensors):
            raise ValueError("the fragments' tensors aren't the layout's tensors")
        for spec in self.tensors:
            own = covered[spec.name]
            gapless = all(left.stop == right.start for left, right in pairwise(own))
            if own[0].start != 0 or own[-1].stop != spec.numel or not gapless:
                raise ValueError(f"the pieces of {spec.name} don't cover it exactly once")
        for index, fragment in enumerate(self.fragments):
            if fragment.fragment_id != index or not 0 < fragment.numel == sum(p.numel for p in fragment.pieces):
                raise ValueError(f"fragment {fragment.fragment_id} has the wrong id or size")

    @property
    def num_fragments(self) -> int:
        """The effective P."""
        return len(self.fragments)

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(spec.numel for spec in self.tensors)

    @cached_property
    def _lines(self) -> tuple[str, ...]:
        specs = {spec.name: spec for spec in self.tensors}
        return tuple(
            f"{piece.tensor}[{piece.start}:{piece.stop}] {specs[piece.tensor].dtype} "
            f"({','.join(map(str, specs[piece.tensor].shape))}) fragment={fragment.fragment_id} rule={piece.rule}"
            for fragment in self.fragments
            for piece in fragment.pieces
        )

    def lines(self) -> tuple[str, ...]:
        """One canonical line a piece, by fragment, in the order of the flat vector."""
        return self._lines

    def fingerprint(self) -> str:
        """SHA-256 in hex over the format's own line and `lines()`."""
        return hashlib.sha256("\n".join((_FORMAT, *self._lines)).encode()).hexdigest()


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> str | None:
    """The first thing in which two layouts differ, as a sentence, or None.

    A tensor that only one side has is told before anything else, since it moves all fragments.

    Args:
        mine: `Layout.lines()` of this side.
        theirs: The other side's.
    """
    my_names, their_names = (dict.fromkeys(line.partition("[")[0] for line in side) for side in (mine, theirs))
    for name in my_names:
        if name not in their_names:
            return f"they lack tensor {name}, which we have"
    for name in their_names:
        if name not in my_names:
            return f"they have tensor {name}, which we lack"
    for my_line, their_line in zip(mine, theirs, strict=False):
        if my_line != their_line:
            return f"we have '{my_line}', they have '{their_line}'"
    if len(mine) != len(theirs):
        return f"we have {len(mine)} pieces, they have {len(theirs)}"
    return None


@dataclass(frozen=True, slots=True)
class _Item:
    """Some rows of a tensor, before it is known which: what the packing moves around."""

    name: str
    index: int
    num_rows: int
    size_bytes: int


def _items(spec: TensorSpec, num_pieces: int) -> Iterable[_Item]:
    """Cut a tensor into pieces whose numbers of rows differ by one at most."""
    row_bytes = spec.size_bytes // spec.num_rows
    base, extra = divmod(spec.num_rows, num_pieces)
    for index in range(num_pieces):
        rows = base + (index < extra)
        yield _Item(spec.name, index, rows, rows * row_bytes)


def _pack(items: list[_Item], num_bins: int) -> tuple[list[dict[str, int]], int]:
    """Longest processing time first: {tensor: rows} of each bin, and the fullest bin's bytes."""
    loads = [0] * num_bins
    bins: list[dict[str, int]] = [{} for _ in range(num_bins)]
    for item in sorted(items, key=lambda i: (-i.size_bytes, i.name, i.index)):
        target = min(range(num_bins), key=lambda b: (loads[b], b))
        loads[target] += item.size_bytes
        bins[target][item.name] = bins[target].get(item.name, 0) + item.num_rows
    return bins, max(loads)


def _balance(specs: Sequence[TensorSpec], rules: dict[str, MergeRule], num_fragments: int) -> list[dict[str, int]]:
    """Rows of each tensor in each fragment, by the rule that `build_layout` states."""
    total = sum(spec.size_bytes for spec in specs)
    best: tuple[list[dict[str, int]], int] | None = None
    for rda_cut in _RDA_CUTS:
        items: list[_Item] = []
        for spec in specs:
            pieces = 1
            if 3 * spec.size_bytes * num_fragments > 4 * total:
                cut = _MEAN_CUT if rules[spec.name] is MergeRule.MEAN else rda_cut
                pieces = min(spec.num_rows, -(-spec.size_bytes * num_fragments * cut // total))
            items.extend(_items(spec, pieces))
        packed = _pack(items, min(num_fragments, len(items)))
        if best is None or (-len(packed[0]), packed[1]) < (-len(best[0]), best[1]):
            best = packed
        if len(best[0]) == num_fragments and 3 * best[1] * num_fragments <= 4 * total:
            break
    assert best is not None
    return best[0]


def build_layout(
    tensors: Iterable[TensorSpec],
    *,
    num_fragments: int,
    merge: MergeRule,
    mean_patterns: Sequence[str] = DEFAULT_MEAN_PATTERNS,
) -> Layout:
    """Spread tensors over fragments of about equal bytes.

    The rule: tensors go, biggest first, to the fragment that has the fewest bytes; ties by name and
    lowest fragment. Only a tensor of more than 4/3 of the mean fragment (all bytes / `num_fragments`) is
    split, by rows. One that takes the plain mean is cut into eighths of the mean fragment, since its
    rows merge independently. An RDA tensor is cut into the fewest pieces no bigger than the mean
    fragment; only if the fullest fragment then exceeds 4/3 of the mean are halves, quarters and
    eighths tried, and the best kept. Rows of one tensor that meet in one fragment are one piece.
    Fewer pieces than fragments make fewer fragments: none is empty.

    Args:
        tensors: Each once (tied weights once), names canonical, in any order.
        num_fragments: P that is wished for, at least 1.
        merge: The rule for tensors that no pattern names.
        mean_patterns: Shell patterns of the names that always take the plain mean.

    Returns:
        The layout; `num_fragments` in it is the effective P.

    Raises:
        ConfigError: There is no tensor, one is empty, two have one name, or P is below 1.
    """
    specs = sorted(tensors, key=lambda spec: spec.name)
    if num_fragments < 1:
        raise ConfigError(f"there must be at least one fragment, not {num_fragments}", where="sync.fragments")
    if not specs:
        raise ConfigError("the model has no parameter to train", where="model")
    for left, right in pairwise(specs):
        if left.name == right.name:
            raise ConfigError("two tensors have this name", where=left.name)
    for spec in specs:
        if spec.numel == 0:
            raise ConfigError("the tensor has no elements", where=spec.name)
    rules = {
        spec.name: MergeRule.MEAN if any(fnmatchcase(spec.name, pattern) for pattern in mean_patterns) else merge
        for spec in specs
    }
    lengths = {spec.name: row_length(spec.shape) for spec in specs}
    starts = dict.fromkeys(lengths, 0)
    fragments: list[Fragment] = []
    for index, rows_of in enumerate(_balance(specs, rules, num_fragments)):
        pieces: list[Piece] = []
        for name in sorted(rows_of):
            start, stop = starts[name], starts[name] + rows_of[name] * lengths[name]
            pieces.append(Piece(tensor=name, start=start, stop=stop, row_length=lengths[name], rule=rules[name]))
            starts[name] = stop
        numel = sum(piece.numel for piece in pieces)
        fragments.append(Fragment(fragment_id=FragmentId(index), pieces=tuple(pieces), numel=numel))
    return Layout(tensors=tuple(specs), fragments=tuple(fragments))
