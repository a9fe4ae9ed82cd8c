"""Fields that constrain an output: `response_format`, and what clients of vLLM and llama.cpp send instead.

Owns the fields' names. Each spelling becomes one `Constraint`; knows no engine and no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, StrictBool, StrictStr

from foresay.server.errors import FieldError
from foresay.server.fields import Fields, Items, Neutral
from foresay.text.client_grammars import Written
from foresay.text.grammar import ANY_OBJECT, Source

Schema = StrictStr | dict[str, Any]
"""A JSON schema, or its text."""
Choices = Annotated[Items[StrictStr], Field(min_length=1)]


class Constraint(NamedTuple):
    """A schema or grammar that an output matches, which may not have been read."""

    field: str
    """The field that requests it, for errors."""
    source: Source | Written


class NamedSchema(Fields):
    """A named JSON schema."""

    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Fields):
    """Format of the output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """Schema of a JSON object, as llama.cpp takes it."""

    def requested_schema(self) -> Mapping[str, Any] | None:
        """Return the schema of the output, or None for free text."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError("response_format.json_schema", "and type=json_schema require each other")
        if self.schema_ is not None and self.type != "json_object":
            raise FieldError("response_format.schema", "requires type=json_object")
        if self.json_schema is not None:
            return self.json_schema.schema_
        if self.schema_ is not None:
            return self.schema_
        return ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(Fields):
    """vLLM's object of constraints, of which a request has one."""

    neutral: ClassVar[Neutral] = {
        "disable_fallback": (True, False),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    }

    json_: Schema | None = Field(None, alias="json")
    regex: StrictStr | None = None
    choice: Choices | None = None
    grammar: StrictStr | None = None
    json_object: StrictBool | None = None


class OutputFields(Fields):
    """Fields of a request that constrain its outputs."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: StrictStr | None = None
    guided_choice: Choices | None = None
    guided_grammar: StrictStr | None = None
    """Older names of vLLM."""
    json_schema: Schema | None = None
    grammar: StrictStr | None = None
    """Names of llama.cpp."""

    def constraint(self) -> Constraint | None:
        """Return the constraint of the outputs, or None for free text. Raises ApiError for two constraints."""
        first, second = ([*self._constraints(), None, None])[:2]
        if first is not None and second is not None:
            raise FieldError(second.field, f"cannot be combined with {first.field}: an output follows one of them")
        if self.structured_outputs is not None and first is None:
            raise FieldError("structured_outputs", "needs json, json_object, regex, choice or grammar")
        return first

    @property
    def constraint_field(self) -> str:
        """The field that constrains the outputs; empty without one."""
        return next((one.field for one in self._constraints()), "")

    def _constraints(self) -> Iterator[Constraint]:
        """Yield each constraint. A schema that is no text has been read with the request."""
        schema = None if self.response_format is None else self.response_format.requested_schema()
        if schema is not None:
            yield Constraint("response_format", schema)
        if self.structured_outputs is not None:
            for kind, value in self.structured_outputs.model_dump(by_alias=True, exclude_none=True).items():
                if value is not False:
                    source = ANY_OBJECT if kind == "json_object" else value
                    yield _constraint(f"structured_outputs.{kind}", kind, source)
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "grammar"):
            if (value := getattr(self, name)) is not None:
                yield _constraint(name, name.removeprefix("guided_"), value)


def _constraint(field: str, kind: str, value: Any) -> Constraint:
    return Constraint(field, value if isinstance(value, Mapping) else Written(kind, value))
