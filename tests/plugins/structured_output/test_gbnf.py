"""GBNF, as llama.cpp writes grammars: random ones have the texts of Python's regular expressions, and mistakes are named."""

from __future__ import annotations

import functools
import itertools
import random
import re
import time
from typing import Any

import llguidance
import pytest

from pelton.errors import RequestError
from pelton_plugins.structured_output.gbnf import gbnf_to_lark
from pelton_plugins.structured_output.sources import lark_of


class Bytes:
    """A token for each byte."""

    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


@functools.lru_cache(maxsize=1)
def matcher_of(grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(TOKENIZER, lark_of(grammar))
    assert not matcher.is_error(), (matcher.get_error(), lark_of(grammar))
    return matcher


def accepts(grammar: str, text: str) -> bool:
    matcher, ids = matcher_of(grammar), list(text.encode())
    assert matcher.reset()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CASES = {
    'root ::= ("a"*)*': (["", "aa"], ["b"]),
    'root ::= "a"** "b"': (["b", "aab"], ["a"]),
    'root ::= ("a"+)? [b-d]{2}{2}': (["bcdb", "aabbbb"], ["abb"]),
    'root ::= "a"{,2} "b"{1,}': (["b", "aab"], ["aaab", "aa"]),
    # A part does not take what the next one needs.
    'root ::= [a-z]* "ab"': (["ab", "xxab", "abab"], ["xx"]),
    'root ::= x "b"\nx ::= [ab]*': (["b", "abb"], ["a"]),
    # Characters by their numbers, and those that mean something to regular expressions.
    'root ::= "\\u00e9" [\\u00e8-\\u00ea] "\\x41\\U0001F600"': (["éêA😀"], ["éëA😀"]),
    "root ::= [+--] [&&] [\\]^-] [^\\n/]": (["+&]x", ",&^\\", "-&--"], ["+&]/", ".&]x"]),
    'root ::= . "/" [/]': (["\n//", "x//"], ["//"]),
    'root ::= "\\"\\\\\\n\\t"': (['"\\\n\t'], ["x"]),
    # Lines, comments, nothing at all, names that Lark has or that differ by case alone.
    '# c\nroot ::= "a" # d\n  | ("b"\n "c") |\n  start # e\n\nstart ::= | "x"\n': (["a", "bc", "x", ""], ["b"]),
    'root ::= a-b a_b A-B\na-b ::= "x"\na_b ::= "y"\nA-B ::= "z"': (["xyz"], ["xzy"]),
    'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"': (["12+(3+(4))"], ["(1", "1+"]),
}


@pytest.mark.parametrize("grammar", CASES, ids=range(len(CASES)))
def test_texts_of_grammars(grammar):
    right, wrong = CASES[grammar]
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


def random_parts(rng: random.Random, depth: int, rules: list[tuple[str, str]]) -> tuple[str, str]:
    """A part of a grammar, and the same as a regular expression."""
    kind = rng.random()
    if depth == 0 or kind < 0.25:
        return rng.choice([('"a"', "a"), ('"b"', "b"), ('"ab"', "ab"), ("[ab]", "[ab]"), ("[^b]", "[^b]"), ('""', "")])
    if kind < 0.45 and rules:
        return rng.choice(rules)
    one, other = (random_parts(rng, depth - 1, rules) for _ in range(2))
    if kind < 0.65:
        repeat = rng.choice(["*", "+", "?", "{2}", "{1,2}", "{,1}", "{2,}"])
        nested = one[0] if rng.random() < 0.3 and one[0][-1] in '"])*+?}' else f"({one[0]})"
        whole = re.fullmatch(r'"\w*"|\[\^?\w+\]|\(.*\)[*+?]?', nested) is not None and nested.count("(") <= 1
        return f"{nested if whole else f'({nested})'}{repeat}", f"(?:{one[1]}){repeat.replace('{,', '{0,')}"
    if kind < 0.8:
        return f"({one[0]} | {other[0]})", f"(?:{one[1]}|{other[1]})"
    return f"({one[0]} {other[0]})", f"(?:{one[1]}{other[1]})"


def test_random_grammars_have_the_texts_of_regular_expressions():
    rng, texts = random.Random(5), ["".join(each) for n in range(6) for each in itertools.product("ab", repeat=n)]
    num_right = 0
    for _ in range(60):
        rules: list[tuple[str, str]] = []
        lines = []
        for index in range(rng.randint(1, 4)):
            text, pattern = random_parts(rng, 3, rules)
            lines.append(f"rule-{index} ::= {text}")
            rules.append((f"rule-{index}", pattern))
        grammar = "\n".join([f"root ::= {rules[-1][0]}", *lines])
        expected = [text for text in texts if re.fullmatch(rules[-1][1], text)]
        assert [text for text in texts if accepts(grammar, text)] == expected, (grammar, rules[-1][1])
        num_right += len(expected)
    assert num_right > 300


@pytest.mark.parametrize(
    "grammar, message",
    [
        ('root ::= "a', 'line 1 needs the " at its end'),
        ("root ::= [a", "line 1 needs the ] at its end"),
        ('root ::= ("a"\n"b"', "line 2 needs ) at its end"),
        ("root ::= [z-a]", "a range that goes up, not 'z' to 'a'"),
        ('root ::= "a"{3,2}', "a count that goes up, not {3,2}"),
        ('root ::= "a"{}', "a count such as {2}, {2,} or {2,5}"),
        ("root ::= []", "a character in the class"),
        ('root ::= "\\q"', "another escape than \\q"),
        ('root ::= "\\uD800"', "another escape than \\u"),
        ('root ::= x\nx = "a"', "line 2 needs ::= before '= \"a\"'"),
        ('root ::= )', "the name of a rule before ')'"),
        ('x ::= "a"', "there is no rule 'root'"),
        ("root ::= x", "rule 'root' refers to 'x', which is not defined"),
        ('root ::= "a"\nroot ::= "b"', "rule 'root' is defined twice"),
    ],
)  # fmt: skip
def test_mistakes_are_named(grammar, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        gbnf_to_lark(grammar)


def test_long_chains_of_rules_take_time_by_their_length():
    def seconds(count: int) -> float:
        rules = "\n".join(f"a{index} ::= a{index + 1}" for index in range(count))
        began = time.process_time()
        gbnf_to_lark(f'root ::= a0\n{rules}\na{count} ::= "x"')
        return time.process_time() - began

    assert seconds(8000) < 40 * min(seconds(500) for _ in range(5))
