"""The constraint on a request's output, under each of the names that clients use for it."""

from __future__ import annotations

import json

import msgspec

from pelton.errors import RequestError
from pelton.sampling_params import StructuredOutputsParams
from pelton_plugins.server.protocol import GenerateRequest

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older fields, and the constraints that they are."""


def structured_outputs(request: GenerateRequest) -> StructuredOutputsParams | None:
    """From `structured_outputs`, `response_format` or one of vLLM's `guided_*` fields; at most one of them may be there."""
    fields = ("structured_outputs", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    given = [name for name in fields if getattr(request, name) is not None]
    if request.response_format is not None and request.response_format.type == "text":
        given.remove("response_format")
    if len(given) > 1:
        raise RequestError(f"Give one of {' and '.join(given)}, not both.", param=given[-1])
    if not given:
        return None
    if given == ["structured_outputs"]:
        return request.structured_outputs
    if given == ["response_format"]:
        return _response_format(request)
    value = getattr(request, given[0])
    try:
        return StructuredOutputsParams(
            **{GUIDED[given[0]]: value}, whitespace_pattern=request.guided_whitespace_pattern
        )
    except RequestError as error:
        raise RequestError(str(error), param=given[0]) from None


def _response_format(request: GenerateRequest) -> StructuredOutputsParams:
    asked = request.response_format
    assert asked is not None
    if asked.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if asked.type == "structural_tag":
        tag = {
            name: value for name in ("structures", "triggers", "format") if (value := getattr(asked, name)) is not None
        }
        return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", **tag}))
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise RequestError("A format of type json_schema needs a schema.", param="response_format.json_schema")
    return StructuredOutputsParams(json=asked.json_schema.schema)


def is_json_format(request: GenerateRequest) -> bool:
    """Return whether `response_format` asks for JSON."""
    return request.response_format is not None and request.response_format.type in ("json_object", "json_schema")


def constraint_field(request: msgspec.Struct) -> str:
    """The field of the request that holds the constraint."""
    return next((name for name in (*GUIDED, "response_format") if getattr(request, name, None) is not None), "")
