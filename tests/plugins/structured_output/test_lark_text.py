"""Grammars of texts as they hold the texts of JSON, against Python's regexes."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pelton.errors import RequestError
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import StructuredOutputContext
from pelton.testing.models import EOS_ID, VOCAB_SIZE, make_tiny_tokenizer
from pelton_plugins.structured_output.auto import AutoBackend
from pelton_plugins.structured_output.lark_text import in_json

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk   // one of two
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""
"""Lines of text between lines of marks: the line break ends what may have any escape in it."""
ADDED = "*** Begin Patch\n*** Add File: a\"b\\c\té.py\n+print('\\n')\n+\n*** End Patch\n"


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    path = make_tiny_tokenizer(tmp_path_factory.mktemp("lark_text"))
    backend = AutoBackend(
        StructuredOutputContext(tokenizer_path=str(path), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_ID])
    )
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))

    def take(lark, written):
        part = {"type": "json_text", "grammar": lark, "name": "The grammar of f"}
        grammar = backend.compile(StructuredOutputsParams(structural_tag={"format": part}))
        ids = [*tokenizer.encode(written, add_special_tokens=False).ids, EOS_ID]
        return grammar.validate(ids) == len(ids)

    return take


@pytest.mark.parametrize(
    "text, is_right",
    [
        (ADDED, True), (ADDED.replace("Begin", "begin"), False), (ADDED + "x", False), (ADDED[:-1], True),
        ("*** Begin Patch\n*** Delete File: x\n*** End Patch", True), ("*** Begin Patch\n*** End Patch", False),
        (ADDED.replace("+\n", "+" + 'abc"\\ ' * 200 + "\n"), True),
    ],
)  # fmt: skip
def test_a_patch_is_held(taken, text, is_right):
    assert taken(PATCH, json.dumps(text, ensure_ascii=False)) == is_right


@pytest.mark.parametrize(
    "lark, regex",
    [
        ("start: /[^a]+/", "[^a]+"),
        (r"start: /[\s\S]*/", r"[\s\S]*"),
        ("start: /.*/", ".*"),
        ("start: /.*/s", "(?s:.*)"),
        (r'start: /"+\\?n*/', r'"+\\?n*'),
        (r"start: /(\n|a|\t){2,3}/", r"(\n|a|\t){2,3}"),
        (r'start: "a" /[^n]*/ "\n" B?' + "\n" + r'B: "\"" | "\\"', r'a[^n]*\n["\\]?'),
        (r"start: /\W\D[\x20-\x22]/", r"\W\D[\x20-\x22]"),
        (r"start: /a\n/i", r"[aA]\n"),
        (r"start: /(?:\p{L}|\x{5c})*/", r"[a-zA-Zé\\]*"),
        ('start: ("!" .. "#")+', '[!"#]+'),
        ('root ::= "\\"" [^b]* "\\n"', '"[^b]*\n'),
        ('start: pair ("," pair)*\npair: KEY "=" /[^,=]*/\nKEY: /[a-z"]+/', '[a-z"]+=[^,=]*(,[a-z"]+=[^,=]*)*'),
        ('start: A ("," A)*\nA: "a".."b" | "n"\n%ignore /[ \\n]+/', "[abn][ \n]*(,[ \n]*[abn][ \n]*)*"),
        ('start: "[" start "]" | "\\""', r'"|\["\]|\[\["\]\]'),
    ],
)
def test_texts_in_json_are_those_of_the_grammar(taken, lark, regex):
    letters = st.sampled_from([*'aabn"\\\n\t =,[]!#', "\x01", "é"])
    most = 5 if "start ]" in lark or '"[" start' in lark else 8

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(
        st.text(letters, max_size=most)
        | st.from_regex(re.compile(regex), fullmatch=True).filter(lambda one: len(one) < 30)
    )
    @example("")
    def run(text):
        if any(char not in 'aAbn"\\\n\t =,[]!#\x01é' for char in text):
            return
        assert taken(lark, json.dumps(text, ensure_ascii=False)) == bool(re.fullmatch(regex, text)), text

    run()


@pytest.mark.parametrize(
    "lark, what",
    [
        ("start: %json {}", "%json"), ("start: /a$/", "'[$]'"), ("start: <x>", "'<x>'"), ("start: A\nA: /a/ & ~/b/", "'&'"),
        ("%import common.FOO\nstart: FOO", "FOO"), ('start: "(" start ")" | /.+/ "\\n"', "the rule start"),
        ('start: /.+/ "\\n"\n%ignore " "', "%ignore"), ("start: /(?i)a/", r"'\('"), (r"start: /[\p{P}]/", r"p\{P\}"),
        ('start: "a', "'\"'"), ('start: "\\n"i', "i"), ("start: /a/x", "flag x"), ('start: "' + "a" * 40_000 + '"', "40009 characters"),
        ("start[lazy]: /a/", "lazy"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused_by_name(taken, lark, what):
    with pytest.raises(RequestError, match=f"The grammar of f cannot be held within a call because of .*{what}"):
        taken(lark, '"a"')


@pytest.mark.parametrize(
    "lark",
    [
        '"' * 32_000, '"\\' * 16_000, "/" * 32_000, "/\\" * 16_000, "start: /" + "[" * 32_000, "a: b\n" * 6_000 + "start: /./ /./s",
        "".join(f"r{i}: r{i + 1}\n" for i in range(2_500)) + 'r2500: /./ "\\n"', 'start: "a"' + " " * 32_000,
        "start: /" + "".join(f"\\x{{{i:x}}}" for i in range(4_000)) + "/",
    ],
    ids=lambda one: one[:8],
)  # fmt: skip
def test_long_grammars_grow_by_what_their_characters_become_or_are_refused(lark):
    with contextlib.suppress(RequestError):
        assert len(in_json(lark, "f")) < 400 * len(lark)
