"""HTML and SVG from function calls: whatever isn't markup already is escaped, without exception."""

from __future__ import annotations

import html
import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Markup", "join", "number", "script_json", "tag"]

_VOID: Final = frozenset({"meta", "br", "col", "input"})
# Characters that no HTML document may contain, and that a damaged file may put into a reason.
_FORBIDDEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is markup already and must not be escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element.

    Args:
        name: The element's name.
        children: Markup as it is; anything else as escaped text; lists and generators are flattened; None is nothing.
        attributes: None and False are left out; underscores become dashes, a trailing one is dropped (`class_`).
    """
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        parts.append(f' {label}="{_escaped("" if value is True else _text(value))}"')
    parts.append(">")
    if name not in _VOID:
        parts.extend(_flat(children))
        parts.append(f"</{name}>")
    return Markup("".join(parts))


def join(*children: object) -> Markup:
    """Children without an element around them."""
    return Markup("".join(_flat(children)))


def script_json(element_id: str, value: Any) -> Markup:
    """Data for the page's script, in a form that can't end the element that it stands in."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Markup(text), type="application/json", id=element_id)


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def _flat(children: Iterable[object]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            yield child
        elif isinstance(child, str | int | float):
            yield _escaped(_text(child))
        else:
            assert hasattr(child, "__iter__"), f"{type(child).__name__} is neither text nor markup"
            yield from _flat(child)


def _text(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    return html.escape(_FORBIDDEN.sub("\ufffd", text))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
