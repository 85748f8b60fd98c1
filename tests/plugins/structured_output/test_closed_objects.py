"""Which objects of a schema are closed to properties that nobody names."""

from __future__ import annotations

import pytest

from pelton_plugins.structured_output.closed_objects import closed

INTEGER = {"type": "integer"}
ONE, OTHER = {"properties": {"a": INTEGER}}, {"properties": {"b": INTEGER}}
NO = {"additionalProperties": False}


@pytest.mark.parametrize(
    "schema, expected",
    [
        pytest.param(ONE, ONE | NO, id="plain"),
        pytest.param({"properties": {}}, {"properties": {}} | NO, id="none-named"),
        pytest.param({"type": "object"}, {"type": "object"}, id="names-nothing"),
        pytest.param(ONE | {"required": ["b"]}, ONE | {"required": ["b"]}, id="needs-another"),
        pytest.param(ONE | {"additionalProperties": True}, ONE | {"additionalProperties": True}, id="says-yes"),
        pytest.param(ONE | {"additionalProperties": ONE}, ONE | {"additionalProperties": ONE | NO}, id="says-which"),
        pytest.param(ONE | {"minProperties": 2}, ONE | {"minProperties": 2}, id="needs-more"),
        pytest.param(ONE | {"patternProperties": {"^x": ONE}}, ONE | {"patternProperties": {"^x": ONE | NO}} | NO, id="patterns"),
        pytest.param({"items": ONE}, {"items": ONE | NO}, id="items"),
        pytest.param({"properties": {"x": ONE}}, {"properties": {"x": ONE | NO}} | NO, id="nested"),
        pytest.param({"anyOf": [ONE, OTHER]}, {"anyOf": [ONE | NO, OTHER | NO]}, id="alternatives"),
        pytest.param({"anyOf": [ONE]} | OTHER, {"anyOf": [ONE]} | OTHER, id="alternatives-beside-properties"),
        pytest.param({"allOf": [ONE, OTHER]}, {"allOf": [ONE, OTHER]}, id="all"),
        pytest.param({"allOf": [ONE], "title": "A"}, {"allOf": [ONE | NO], "title": "A"}, id="all-of-one"),
        pytest.param(ONE | {"if": OTHER, "then": OTHER}, ONE | {"if": OTHER, "then": OTHER}, id="if"),
        pytest.param(ONE | {"not": OTHER}, ONE | {"not": OTHER}, id="not"),
        pytest.param({"$ref": "#/$defs/A", "$defs": {"A": ONE}}, {"$ref": "#/$defs/A", "$defs": {"A": ONE | NO}}, id="reference"),
        pytest.param({"$ref": "#/$defs/A", "$defs": {"A": ONE}} | OTHER, {"$ref": "#/$defs/A", "$defs": {"A": ONE}} | OTHER,
                     id="reference-beside-properties"),
        pytest.param({"allOf": [{"$ref": "#/$defs/A"}, OTHER], "$defs": {"A": {"$ref": "#/$defs/B"}, "B": ONE, "C": ONE}},
                     {"allOf": [{"$ref": "#/$defs/A"}, OTHER], "$defs": {"A": {"$ref": "#/$defs/B"}, "B": ONE, "C": ONE | NO}},
                     id="parts-by-reference"),
        pytest.param({"properties": {"x": {"allOf": [{"$ref": "#"}, OTHER]}}}, {"properties": {"x": {"allOf": [{"$ref": "#"}, OTHER]}}},
                     id="the-whole-is-a-part"),
        pytest.param({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"next": {"$ref": "#/$defs/A"}}}}},
                     {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"next": {"$ref": "#/$defs/A"}}} | NO}}, id="itself"),
    ],
)  # fmt: skip
def test_objects_that_stand_alone_are_closed(schema, expected):
    assert closed(schema) == expected
