"""The base of all values that callers pass in. They are frozen, and an invalid or unknown field is reported in one
plain sentence."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from evalpool.schemas.errors import InvalidConfig, InvalidJob

MAX_ITEMS = 10_000
"""The most entries of a list or object in a job. Pydantic keeps an error of about a kilobyte for each wrong entry."""

_NUMBER, _WHOLE, _TEXT, _LIST = "a number", "a whole number", "text", "a list"
_KINDS = {
    "float_type": _NUMBER, "float_parsing": _NUMBER, "finite_number": "a finite number",
    "int_type": _WHOLE, "int_parsing": _WHOLE, "int_from_float": _WHOLE, "int_parsing_size": "a smaller number",
    "string_type": _TEXT, "bool_type": "true or false", "bool_parsing": "true or false",
    "dict_type": "an object", "model_type": "an object", "model_attributes_type": "an object",
    "list_type": _LIST, "tuple_type": _LIST, "literal_error": "{expected}", "enum": "{expected}",
    "greater_than": "greater than {gt}", "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}", "less_than_equal": "at most {le}",
    "path_type": "a path", "is_instance_of": "a {class}",
}  # fmt: skip
"""Pydantic's type of error → what the value must be."""
_SENTENCES = {
    "string_unicode": "it contains an unpaired surrogate, which is not valid text",
    "string_too_short": "it must not be empty",
    "string_too_long": "it must have at most {max_length} characters",
    "too_long": "it has {actual_length} entries; at most {max_length} are allowed",
}
"""Pydantic's type of error → a sentence about the value."""


class Given(BaseModel):
    """A frozen value. An invalid or unknown field raises an `InvalidJob` that names the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def __init__(self, /, *positional: Any, **fields: Any) -> None:
        if positional:
            own, first = type(self).__name__, next(iter(type(self).model_fields))
            raise TypeError(f"{own} takes its fields by name: write {own}({first}=…)")
        for name, value in (("fields", fields), *fields.items()):
            if isinstance(value, list | tuple | dict) and len(value) > MAX_ITEMS:
                raise InvalidJob(f"{name}: it has {len(value):,} entries; at most {MAX_ITEMS:,} are allowed")
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidJob(first_problem(error, type(self))) from None


def must_be(what: str) -> WrapValidator:
    """A validator for a union of types whose error says in these words what the value must be. Pydantic would name its
    own validators."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            # A sentence of ours about a value of the right type says more than that it must be of this type.
            own = [each for each in error.errors(include_url=False) if each["type"] in ("value_error", *_SENTENCES)]
            raise ValueError(sentence(own[0]) if own else f"it must be {what}, not {type(value).__name__}") from None

    return WrapValidator(check)


def first_problem(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence for the first problem, as in `limits.cpu_seconds: it must be greater than 0`. Unknown fields come
    before missing ones, since most of them are misspellings of those."""
    problems = error.errors(include_url=False, include_input=False)
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    place = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    if problem["type"] == "extra_forbidden":
        if len(problem["loc"]) > 1:  # a field of a nested value, whose other fields are not known here
            return f"{place}: unknown field"
        meant = nearest(place, model.model_fields)
        hint = f" (did you mean {meant}?)" if meant else ""
        return f"{place}: unknown field{hint}; {model.__name__} has {', '.join(model.model_fields)}"
    message = sentence(problem)
    if not place:
        return message
    nested = isinstance(problem.get("ctx", {}).get("error"), InvalidJob | InvalidConfig)  # which names its own field
    return f"{place}.{message}" if nested else f"{place}: {message}"


def sentence(problem: Mapping[str, Any]) -> str:
    """One of pydantic's errors as a sentence about the value."""
    context = problem.get("ctx", {})
    if problem["type"] in _SENTENCES:
        return _SENTENCES[problem["type"]].format(**context)
    if problem["type"] in _KINDS:
        return f"it must be {_KINDS[problem['type']].format(**context)}"
    return str(problem["msg"]).removeprefix("Value error, ")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to this one; `None` if none is similar."""
    return next(iter(get_close_matches(name, list(known), 1)), None)
