"""Turns pydantic's refusals into sentences for the person who wrote the configuration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from wan_diloco.config.names import nearest, suggest
from wan_diloco.config.relations import join_problems
from wan_diloco.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

__all__ = ["explain", "mistakes", "problem_and_hint", "region_label"]

_VALUE_LENGTH_MAX: Final = 60

_PROBLEMS: Final[dict[str, Callable[[Mapping[str, Any], str], str]]] = {
    "missing": lambda _, __: "is missing",
    "extra_forbidden": lambda _, __: "is unknown",
    "int_type": lambda _, value: f"must be a whole number, not {value}",
    "int_from_float": lambda _, value: f"must be a whole number, not {value}",
    "float_type": lambda _, value: f"must be a number, not {value}",
    "finite_number": lambda _, value: f"must be finite, not {value}",
    "bool_type": lambda _, value: f"must be true or false, not {value}",
    "string_type": lambda _, value: f"must be text, not {value}",
    "model_type": lambda _, value: f"must be a table, not {value}",
    "tuple_type": lambda _, value: f"must be a list, not {value}",
    "greater_than_equal": lambda limit, value: f"must be at least {_number(limit['ge'])}, not {value}",
    "greater_than": lambda limit, value: f"must be more than {_number(limit['gt'])}, not {value}",
    "less_than_equal": lambda limit, value: f"must be at most {_number(limit['le'])}, not {value}",
    "less_than": lambda limit, value: f"must be less than {_number(limit['lt'])}, not {value}",
    "too_short": lambda limit, _: f"must have at least {limit['min_length']} entry",
    "too_long": lambda limit, _: f"must have at most {limit['max_length']} entries",
    "string_pattern_mismatch": lambda limit, value: f"{value} doesn't match {limit['pattern']}",
    "literal_error": lambda limit, value: f"must be {limit['expected']}, not {value}",
    "enum": lambda limit, value: f"must be {limit['expected']}, not {value}",
}
_CHOICES: Final = frozenset({"literal_error", "enum"})


def region_label(regions: object, index: int) -> str:
    """How messages and sources call a region: by its name where it has one, else by its place."""
    if isinstance(regions, (list, tuple)) and index < len(regions) and isinstance(regions[index], dict):
        name = regions[index].get("name")
        if isinstance(name, str) and name:
            return f"regions.{name}"
    return f"regions[{index}]"


def explain(error: ValidationError, tree: Mapping[str, Any], sources: Mapping[str, str]) -> ConfigError:
    """One `ConfigError` that names every wrong key, what is wrong with it and which layer set it.

    Args:
        error: What pydantic raised.
        tree: The merged settings that it refused.
        sources: Dotted key -> the layer that set it.
    """
    return join_problems([_explain_one(detail, tree, sources) for detail in mistakes(error)])


def mistakes(error: ValidationError) -> list[ErrorDetails]:
    """What pydantic found that is a mistake of its own: a list whose entries are refused counts as empty, which isn't.

    Args:
        error: What it raised.
    """
    details = error.errors(include_url=False)
    refused = {detail["loc"][0] for detail in details if len(detail["loc"]) > 1}
    return [detail for detail in details if not (detail["type"] == "too_short" and detail["loc"][0] in refused)]


def problem_and_hint(detail: ErrorDetails, known: Callable[[], str]) -> tuple[str, str]:
    """One mistake in our own words, and what to do about it; the hint may be empty.

    Args:
        detail: Of pydantic.
        known: Called for an unknown key: what there is instead.
    """
    limits, value = detail.get("ctx", {}), detail["input"]
    if "problem" in limits:
        return limits["problem"], limits.get("hint", "")
    say = _PROBLEMS.get(detail["type"])
    problem = say(limits, _shown(value)) if say else detail["msg"]
    return problem, known() if detail["type"] == "extra_forbidden" else _hint(detail["type"], value, limits)


def _explain_one(detail: ErrorDetails, tree: Mapping[str, Any], sources: Mapping[str, str]) -> ConfigError:
    where, section, key = _place(detail["loc"], tree)
    problem, hint = problem_and_hint(detail, lambda: suggest(section, key))
    # what is wrong with a whole table is blamed on whoever set anything in it
    source = sources.get(where) or next((layer for name, layer in sources.items() if name.startswith(f"{where}.")), "")
    return ConfigError(problem, where=where, hint="; ".join(filter(None, (hint, source and f"set by {source}"))))


def _place(location: tuple[int | str, ...], tree: Mapping[str, Any]) -> tuple[str, str, str]:
    """Dotted name, section and key of what pydantic points at."""
    match location:
        case ("regions", int(index), *rest):
            words = [str(word) for word in rest]
            return ".".join([region_label(tree.get("regions"), index), *words]), "regions", words[0] if words else ""
        case (section,):
            return str(section), "", str(section)
        case (section, key, *_):
            return f"{section}.{key}", str(section), str(key)
        case _:
            return "", "", ""


def _hint(kind: str, value: object, limits: Mapping[str, Any]) -> str:
    if kind in _CHOICES and isinstance(value, str):
        near = nearest(value, re.findall(r"'([^']*)'", limits["expected"]))
        return f'did you mean "{near}"' if near else ""
    if kind in {"int_type", "float_type", "bool_type"} and isinstance(value, str):
        return "write it without quotes"
    return ""


def _number(value: float) -> str:
    """A limit in full where it is a whole number, so that it can be copied."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _shown(value: object) -> str:
    text = f"the text {value!r}" if isinstance(value, str) else "a table" if isinstance(value, dict) else repr(value)
    return text if len(text) <= _VALUE_LENGTH_MAX else f"{text[:_VALUE_LENGTH_MAX]}..."
