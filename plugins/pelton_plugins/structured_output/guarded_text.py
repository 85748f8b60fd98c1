"""Text that stays free up to a trigger, behind which a part holds it: what calls of a model's choice are made of.

Free text is anything that a model may write: special tokens, and bytes that are no UTF-8, too. A trigger may be spelled by tokens that
cut it anywhere, or be a special token. An answer ends wherever its text is free.

Between special tokens llguidance reads a free text as one lexeme. Two of them differ in what they must not contain, so that of all
that may come next one alone reads on: a trigger that is complete ends the text at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pelton_plugins.structured_output.structural_tags import Builder

BYTE = r"(?-u:[\x00-\xFE])"
ANY = f"{BYTE}*"
"""Any bytes but the one with which llguidance writes a special token."""
_SPACE = r"[ \t\r\n]*"
_SPACES = r"([ \t\r\n]{1,8})"
"""Few: models that are unsure go on with space."""
_SPECIAL_BYTE = 0xFF
_MAX_CHARS = 256


def quoted_regex(text: str) -> str:
    """A text as a regex between slashes."""
    return "".join(one if one.isalnum() or one == "_" or ord(one) > 127 else f"\\x{{{ord(one):02x}}}" for one in text)


def _either(regexes: Iterable[str]) -> str:
    return "(" + "|".join(regexes) + ")"


def _beginnings(text: str) -> str:
    """A regex of what may be the beginning of a text that is cut: not empty, and not all of it."""
    return _either(quoted_regex(text[:size]) for size in range(1, len(text))) if len(text) > 1 else ""


@dataclass
class _Stops:
    """Regexes of what a free text must not contain: of texts from their first character up to the end of what stops them."""

    wholes: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    """The same of texts that end within it: no special token may come there, as it may be one that readers never see."""

    def add_text(self, text: str) -> None:
        if not 0 < len(text) <= _MAX_CHARS:
            raise ValueError(f"a text of {len(text)} characters; give 1 to {_MAX_CHARS}")
        self.wholes.append(ANY + quoted_regex(text))
        if beginnings := _beginnings(text):
            self.parts.append(ANY + beginnings)

    def add_pattern(self, pattern: str, beginning: str) -> None:
        """A regex that matches at the beginning of a line."""
        self.wholes.append(f"({ANY}\\n)?{pattern}")
        self.parts.append(f"({ANY}\\n)?{beginning}")


class FreeText:
    """The terminals and token sets of free texts, for one grammar."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        vocabulary = builder.vocabulary
        ends = set(vocabulary.eos_token_ids)
        self._others = [
            token_id
            for token_id, token in enumerate(vocabulary.tokens)
            if not token or _SPECIAL_BYTE in token or token_id in builder.special_ids
            if token_id not in ends
        ]

    def terminal(self, *conditions: str) -> str:
        return self._builder.terminal(" & ".join(conditions))

    def text(self, stops: _Stops, *more: str, is_safe: bool = False) -> str:
        """Free text without what stops it. is_safe: nor with the beginning of that at its end."""
        conditions = [f"/{ANY}/"]
        if stops.wholes:
            conditions.append(f"~/{_either(stops.wholes)}{ANY}/")
        if is_safe and stops.parts:
            conditions.append(f"~/{_either(stops.parts)}/")
        return self.terminal(*conditions, *more)

    def others(self, but: Iterable[int]) -> str:
        """Special tokens, and those without a text, but for some; empty without any."""
        left = sorted(set(self._others) - set(but))
        ranges: list[list[int]] = []
        for one in left:
            if ranges and ranges[-1][1] == one - 1:
                ranges[-1][1] = one
            else:
                ranges.append([one, one])
        return f"<[{','.join(f'{a}-{b}' if a < b else str(a) for a, b in ranges)}]>" if ranges else ""

    def lazy(self, *conditions: str) -> str:
        """A text that ends where it first matches."""
        return self._builder.rule(self.terminal(*conditions), suffix="[lazy]")


@dataclass
class _Trigger:
    whole: str
    """Regex of the text up to its end."""
    text: str
    """Empty for one that is a pattern."""
    content: str


def guarded(builder: Builder, part: Mapping[str, Any], where: str, depth: int) -> str:
    """Free text; behind each of `triggers` (a `text`, or a `pattern` at the beginning of a line with the `beginning`s of it) comes its
    `content`. repeats: more than once. excludes: patterns, with their beginnings, that free text does not have. thought: what opens and
    what closes a text at the answer's beginning in which nothing is a trigger. instead: a part that stands in place of all free text:
    an answer is that, or calls behind triggers that are texts."""
    free, stops = FreeText(builder), _Stops()
    instead, thought = part.get("instead"), part.get("thought")
    triggers = []
    for index, one in enumerate(part["triggers"]):
        if instead is not None and "text" not in one:
            continue  # the lexer would read the beginning of a pattern over what else may stand there
        content = builder.rule(builder.part(one["content"], f"{where}.triggers[{index}].content", depth + 1))
        if "text" in one:
            stops.add_text(one["text"])
        else:
            stops.add_pattern(one["pattern"], one["beginning"])
        triggers.append(_Trigger(stops.wholes[-1], one.get("text", ""), content))
    if instead is not None:
        call = builder.rule(" | ".join(f"{_at_once(builder, one.text)} {one.content}" for one in triggers))
        calls = f"{call}+ /{_SPACES}/?" if part["repeats"] else f"{call} /{_SPACES}/?"
        answer = builder.rule(f"{builder.part(instead, f'{where}.instead', depth + 1)} | {calls}")
        if thought is None:
            return answer
        return builder.rule(f"{answer} | {_thought(builder, free, thought, f'/{_SPACES}/? {answer}')}")
    for one in part.get("excludes", ()):
        stops.add_pattern(one["pattern"], one["beginning"])
    if thought is None:
        return builder.rule(_Guarded(builder, free, stops, triggers, ()).whole(repeats=part["repeats"]))
    behind = builder.rule(_Guarded(builder, free, stops, triggers, ()).whole(repeats=part["repeats"]))
    first = _Guarded(builder, free, stops, triggers, thought["begins"])
    answer = first.whole(repeats=part["repeats"])
    return builder.rule(f"{answer} | {_thought(builder, free, thought, behind)}")


def _at_once(builder: Builder, text: str) -> str:
    """A trigger with nothing but space before it: in one lexeme, as what opens a thought may begin in the same way."""
    found = builder.first_special(text)
    if found is None:
        return f"/{_SPACES}?{quoted_regex(text)}/"
    before, token_id, rest = found
    head = f"/{_SPACES}?{quoted_regex(before)}/" if before else f"/{_SPACES}/?"
    return f"{head} <[{token_id}]> {builder.literal(rest) if rest else ''}"


class _Guarded:
    """Free texts of an answer. not_first: texts that its first one does not begin with."""

    def __init__(
        self, builder: Builder, free: FreeText, stops: _Stops, triggers: list[_Trigger], not_first: Sequence[str]
    ) -> None:
        self._builder, self._free, self._stops, self._triggers = builder, free, stops, triggers
        self._not_first = not_first
        self._closed = [builder.special[text] for text in not_first if text in builder.special]

    def whole(self, *, repeats: bool) -> str:
        call, other, text = self._units(())
        go_on = f"({call} | {other})*" if repeats else f"{other}* ({call} {other}*)?"
        rest = f"{go_on} {text}?"
        if not self._not_first:
            return rest
        beginning = _SPACE + _either(map(quoted_regex, self._not_first)) + ANY
        first_call, first_other, first_text = self._units((f"~/{beginning}/",))
        after = rest if repeats else f"{other}* {text}?"
        return f"{first_other} {rest} | {first_call} {after} | {first_text}?"

    def _units(self, conditions: tuple[str, ...]) -> tuple[str, str, str]:
        """A call with the text before it, a special token with it, and text alone."""
        builder, free, stops = self._builder, self._free, self._stops
        calls, by_token = [], dict[int, dict[str, list[str]]]()
        for trigger in self._triggers:
            calls.append(f"{free.lazy(f'/{trigger.whole}/', *conditions)} {trigger.content}")
            found = builder.first_special(trigger.text)
            if found is not None:
                before, token_id, rest = found
                content = f"{builder.literal(rest)} {trigger.content}" if rest else trigger.content
                by_token.setdefault(token_id, {}).setdefault(before, []).append(content)
        text = free.text(stops, *conditions)
        others = []
        if known := free.others([*by_token, *self._closed]):
            others.append(f"{free.text(stops, *conditions, is_safe=True)}? {known}")
        for token_id, by_text in by_token.items():
            for before, contents in by_text.items():
                ahead = free.text(stops, f"/{ANY}{quoted_regex(before)}/", *conditions) if before else f"{text}?"
                calls.append(f"{ahead} <[{token_id}]> ({' | '.join(contents)})")
            if "" not in by_text:
                without = [f"~/{ANY}{quoted_regex(before)}/" for before in by_text]
                others.append(f"{free.text(stops, *without, *conditions, is_safe=True)}? <[{token_id}]>")
        return builder.rule(" | ".join(calls)), builder.rule(" | ".join(others or ['"" "\\xFE"'])), text


def _thought(builder: Builder, free: FreeText, thought: Mapping[str, Any], behind: str) -> str:
    """Text between what opens and what closes it, and what comes behind; cut off anywhere."""
    stops = _Stops()
    opens, closes = [], []
    spelled = [text for text in thought["begins"] if text not in builder.special]
    for text in thought["begins"]:
        if text in builder.special:
            opens.append(f"/{_SPACE}/? <[{builder.special[text]}]>")
    if spelled:
        opens.append(free.lazy(f"/{_SPACE}{_either(map(quoted_regex, spelled))}/"))
    for text in thought["ends"]:
        stops.add_text(text)
    inside = free.text(stops)
    ids = [builder.special[text] for text in thought["ends"] if text in builder.special]
    closes = [f"{free.lazy(f'/{whole}/')} {behind}" for whole in stops.wholes]
    closes += [f"{inside}? <[{token_id}]> {behind}" for token_id in ids]
    known = free.others(ids)
    others = f"({free.text(stops, is_safe=True)}? {known})*" if known else ""
    return f"({' | '.join(opens)}) {others} ({' | '.join(closes)} | {inside}?)"


def messages(builder: Builder, part: Mapping[str, Any], where: str, depth: int) -> str:
    """Messages of a header, `header_end` and a body, with one of `ends` behind it; the last of `ends` begins the next header itself. In a
    header `trigger` is followed by `content`, which holds to the end of the body. shown: special tokens that readers see, so that none is
    hidden in a trigger. starts_inside: the answer begins in a body."""
    free, header, body = FreeText(builder), _Stops(), _Stops()
    ends, header_end, trigger = part["ends"], part["header_end"], part["trigger"]
    for text in (header_end, *ends[:-1], trigger):
        header.add_text(text)
    for text in ends:
        body.add_text(text)
    content = builder.rule(builder.part(part["content"], f"{where}.content", depth + 1))
    ids = {text: builder.special[text] for text in (header_end, *ends) if text in builder.special}
    stops_header = [ids[text] for text in (header_end, *ends[:-1]) if text in ids]
    stops_body = [ids[text] for text in ends if text in ids]
    in_header, in_body = free.text(header), free.text(body)

    shown = {builder.special[text] for text in part["shown"] if text in builder.special}

    def run(stops: _Stops, text: str, but: Sequence[int]) -> str:
        made = [f"{free.text(stops, is_safe=True)}? {known}" if (known := free.others({*but, *shown})) else ""]
        if seen := ",".join(str(one) for one in sorted(shown.difference(but))):
            made.append(f"{text}? <[{seen}]>")
        return builder.rule(f"({' | '.join(filter(None, made))})*") if any(made) else '""'

    heads, bodies = run(header, in_header, stops_header), run(body, in_body, stops_body)

    def ended(stops: _Stops, text: str, marks: Sequence[str]) -> str:
        """Text, and one of some marks behind it."""
        made = [f"{free.lazy(f'/{ANY}{quoted_regex(one)}/')}" for one in marks if one not in ids]
        made += [f"{text}? <[{ids[one]}]>" for one in marks if one in ids]
        return builder.rule(" | ".join(made))

    head, tail = ended(header, in_header, [header_end]), ended(body, in_body, ends)
    behind = builder.rule(" | ".join(builder.literal(text) for text in ends))
    message = f"{head} {bodies} {tail}"
    called = f"{free.lazy(f'/{ANY}{quoted_regex(trigger)}/')} {content}"
    last = f"{heads} ({in_header}? | {head} {bodies} {in_body}?)"
    plain = f"({heads} {message})*"
    if part["repeats"]:
        whole = f"({heads} ({message} | {called} {behind}))* ({last} | {heads} {called})"
    else:
        whole = f"{plain} ({last} | {heads} {called} ({behind} {plain} {last})?)"
    answer = builder.rule(whole)
    return f"({bodies} ({in_body}? | {tail} {answer}))" if part.get("starts_inside") else answer


def raw_text(builder: Builder, part: Mapping[str, Any], where: str, depth: int) -> str:
    """Text up to `end` and over it, of `min_length` to `max_length` characters: without any of `excludes`, and without `marker` (`end`,
    where it is left out) but at its end."""
    end, excludes = part["end"], list(part.get("excludes", ()))
    least, most = part.get("min_length") or 0, part.get("max_length")
    size = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
    found = builder.first_special(end)
    before = end if found is None else found[0]
    conditions = [f"/(?us:.{size}){quoted_regex(before)}/"]
    if found is not None:
        excludes.append(end)
    conditions += without_marks(part.get("marker", end) if found is None else "", excludes)
    text = builder.terminal(" & ".join(conditions))
    if found is None:
        return builder.rule(text, suffix="[lazy]")
    return f"{text} <[{found[1]}]> {builder.literal(found[2]) if found[2] else ''}"


def without_marks(marker: str, excludes: Sequence[str]) -> list[str]:
    """Terminals of texts without a marker but at their end, and without others at all."""
    found = [f"~/{ANY}{quoted_regex(marker)}{BYTE}{ANY}/"] if marker else []
    return [*found, f"~/{ANY}{_either(map(quoted_regex, excludes))}{ANY}/"] if excludes else found
