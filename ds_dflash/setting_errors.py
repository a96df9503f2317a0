"""What pydantic and json find wrong with the settings, as clauses that a user can act on."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "is_instance_of": "text that is not empty",
    "list_type": "a list",
    "dict_type": "a JSON object",
    "model_type": "a JSON object",
}


def shown(value: Any) -> str:
    """The value as JSON, shortened to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate that is most like the name, whatever the case, or None where none is alike."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def nearest_or_all(name: str, candidates: Iterable[str]) -> str:
    """The most similar candidate as a question, or else the list of all."""
    candidates = sorted(candidates, key=str.lower)
    similar = nearest(name, candidates)
    return f"did you mean {similar}?" if similar else f"the names are {', '.join(candidates)}"


def dotted(location: Iterable[int | str]) -> str:
    return ".".join(str(part) for part in location)


def expectation(error: ErrorDetails) -> str:
    """What would have been right, to stand after "must be"."""
    context: Mapping[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "literal_error":
            return str(context["expected"]).replace("'", '"')
        case "greater_than":
            return f"above {context['gt']}"
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "less_than":
            return f"below {context['lt']}"
        case "less_than_equal":
            return f"at most {context['le']}"
        case "string_too_short":
            return "text that is not empty"
        case "too_short":
            return f"a list of at least {context['min_length']}"
        case kind:
            return EXPECTED.get(kind, error["msg"].removeprefix("Input should be "))


def clauses(error: ValidationError, root: type[BaseModel], places: Mapping[str, str]) -> list[str]:
    """Each problem in words; `places` says where the settings that users may misplace belong."""
    return [_clause(one, root, places) for one in error.errors()]


def _clause(error: ErrorDetails, root: type[BaseModel], places: Mapping[str, str]) -> str:
    name = dotted(error["loc"])
    match error["type"]:
        case "value_error":  # raised by our own validators, in whole words
            return str(error["ctx"]["error"])
        case "missing":
            return f"{name} is missing"
        case "extra_forbidden":
            return f"{name} is not a setting: {_what_was_meant(error['loc'], root, places)}"
    return f"{name} is {shown(error['input'])}, but must be {expectation(error)}"


def _what_was_meant(location: tuple[int | str, ...], root: type[BaseModel], places: Mapping[str, str]) -> str:
    """The same name in another place, else the most similar name here, else a very similar one anywhere."""
    *parents, name = (str(part) for part in location)
    here = _names_in(root, parents)
    if name not in places and (similar := nearest(name, here)):
        return f"did you mean {dotted([*parents, similar])}?"
    if similar := nearest(name, places, cutoff=0.75):
        return f"did you mean {places[similar]}?"
    return f"{dotted(parents)} has {', '.join(here)}" if parents else "no setting has a name like it"


def _names_in(root: type[BaseModel], parents: Sequence[str]) -> list[str]:
    for parent in parents:
        inner: Any = root.model_fields[parent].annotation
        assert issubclass(inner, BaseModel), f"{parent} is no model, so pydantic finds no unknown key in it"
        root = inner
    return list(root.model_fields)
