"""What every value a caller hands in has in common: frozen, closed to unknown fields, and plain about what is wrong."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import InvalidJob

MAX_ITEMS = 10_000
"""Entries of any list or object in a job. Pydantic keeps an error of about a kilobyte for each wrong entry."""


class Given(BaseModel):
    """A frozen value that refuses unknown fields and names the wrong one in an `InvalidJob`."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    def __init__(self, /, **fields: Any) -> None:
        for name, value in (("fields", fields), *fields.items()):
            if isinstance(value, list | tuple | dict) and len(value) > MAX_ITEMS:
                raise InvalidJob(f"{name}: {len(value):,} entries; at most {MAX_ITEMS:,} are allowed")
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidJob(first_problem(error, type(self))) from None


def first_problem(error: ValidationError, model: type[BaseModel]) -> str:
    """One sentence for the first thing wrong: `limits.cpu_seconds: Input should be greater than 0`. Names that are not
    known come before such that are missing: most often they were meant."""
    problems = error.errors(include_url=False, include_input=False)
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    place = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    if problem["type"] == "extra_forbidden":
        return f"{place}: unknown field; {model.__name__} has {', '.join(model.model_fields)}"
    message = problem["msg"].removeprefix("Value error, ")
    if not place:
        return message
    inner = isinstance(problem.get("ctx", {}).get("error"), InvalidJob)  # of a value within: it names its own field
    return f"{place}.{message}" if inner else f"{place}: {message}"
