"""Context-free grammars: GBNF becomes Lark; of Lark, what would do more than constrain the text is refused by name."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from trunkline.status import invalid
from trunkline_worker.grammar.portable_regex import regex_literal
from trunkline_worker.grammar.schema_check import parsed_json, schema_text

MAX_RULES = 1_000  # which the library follows by recursion
MAX_REPEATS = 1_000  # of one {m,n}

GBNF = re.compile(
    r"""
      (?P<space> \s+ | \#[^\n]* )
    | (?P<rule> (?P<defined>[A-Za-z0-9_-]+) \s* ::= )
    | (?P<name> [A-Za-z0-9_-]+ )
    | "(?P<literal> (?: [^"\\\n\r] | \\[^\n\r] )* )"
    | \[(?P<negated>\^?)(?P<class> (?: [^\]\\\n\r] | \\[^\n\r] )+ )\]
    | (?P<repeat> [*+?] | \{ \s* (?P<least>[0-9]{1,6}) \s* (?: , \s* (?P<most>[0-9]{1,6})? \s* )? \} )
    | (?P<dot> \. )
    | (?P<mark> [()|] )
    """,
    re.VERBOSE,
)
GBNF_CHARACTER = re.compile(
    r"\\(?P<code> x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | U[0-9a-fA-F]{8} ) | \\[nrt\\\"\[\]^-] | [^\\]",
    re.VERBOSE | re.DOTALL,
)
DIRECTIVES = ("%ignore", "%import")
LARK = re.compile(
    r"""
      (?P<left_out> //[^\n]* | \#[^\n]* )
    | (?P<space> \s+ )
    | (?P<string> "(?: [^"\\\n\r] | \\[^\n\r] )*" i? )
    | (?P<regex> /(?: [^/\\\n\r] | \\[^\n\r] )+/ [imsux]* )
    | (?P<repeat> \{ \s* (?P<least>[0-9]{1,6}) \s* (?: , \s* (?P<most>[0-9]{1,6})? \s* )? \} )
    | (?P<json> % (?:json|llguidance) \b \s* (?=\{) )
    | (?P<directive> % [A-Za-z]* )
    | (?P<name> [?!]? [A-Za-z_][A-Za-z0-9_-]* )
    | (?P<number> [0-9]{1,6} )
    | (?P<mark> -> | \.\. | :(?!:) | [()\[\]|?*+~&,.] )
    """,
    re.VERBOSE,
)


def lark_grammar(text: str, embedded: Sequence[Mapping[str, str]] = ()) -> str:
    """A grammar for the library.  embedded: others, to which the text refers by their names"""
    return json.dumps({"grammars": [{"lark_grammar": text}, *embedded]})


def lark_string(text: str) -> str:
    """The literal that stands for `text`."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def gbnf_as_lark(text: str) -> str:
    """A grammar in the form of GBNF, as Lark. Rules without recursion become terminals: they are matched as a whole."""
    rules = _gbnf_rules(text)
    if "root" not in rules:
        raise invalid("grammar", "there is no rule `root`")
    references = {name: {part[1:] for part in parts if part[0] == " "} for name, parts in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in references.items():
        for other in used:
            if other not in rules:
                raise invalid("grammar", "a rule refers to one that is not defined")
            users[other].append(name)
    terminals = [name for name, used in references.items() if not used]
    for terminal in terminals:
        for user in users[terminal]:
            references[user].discard(terminal)
            if not references[user]:
                terminals.append(user)
    names = {name: f"r{index}" for index, name in enumerate(rules)}
    names |= {name: names[name].upper() for name in terminals}
    lines = [f"start: {names['root']}"]
    for name, parts in rules.items():
        lines.append(f"{names[name]}: " + " ".join(names[part[1:]] if part[0] == " " else part for part in parts))
    return "\n".join(lines)


def _gbnf_rules(text: str) -> dict[str, list[str]]:
    """Each rule in parts of Lark; a reference to a rule is its name after a space."""
    rules: dict[str, list[str]] = {}
    parts: list[str] = []
    for token in _tokens(GBNF, text):
        if token.lastgroup == "rule":
            _end_of_group(parts)
            parts = []
            if rules.setdefault(token["defined"], parts) is not parts or len(rules) > MAX_RULES:
                raise invalid("grammar", f"a rule is defined twice, or there are more than {MAX_RULES}")
        elif token.lastgroup != "space" and not rules:
            raise invalid("grammar", "the first rule is missing")
        elif token.lastgroup == "repeat":
            if not parts or parts[-1] in "(|":
                raise invalid("grammar", "a repetition must follow what it repeats")
            repeat = _repeat(token) if token["least"] else token[0]
            if parts[-1][0] == "/" and parts[-1][-2] in ")]":
                # One lexeme is much faster than one for each character.
                parts[-1] = f"{parts[-1][:-1]}{repeat}/"
            else:
                parts.append(repeat)
        elif token.lastgroup != "space":
            if token[0] in ("|", ")"):
                _end_of_group(parts)
            parts.append(_gbnf_part(token))
    _end_of_group(parts)
    return rules


def _gbnf_part(token: re.Match[str]) -> str:
    match token.lastgroup:
        case "name":
            return " " + token["name"]
        case "literal":
            return lark_string("".join(character for character, _ in _characters(token["literal"])))
        case "class":
            return f"/[{token['negated']}{_class(token['class'])}]/"
        case "dot":
            return "/(?s:.)/"
        case _:
            return token[0]


def _end_of_group(parts: list[str]) -> None:
    if not parts or parts[-1] in ("(", "|"):
        parts.append('""')


def _characters(text: str) -> list[tuple[str, bool]]:
    """The characters of a literal or class of GBNF, with whether each is written as an escape."""
    characters = []
    for token in _tokens(GBNF_CHARACTER, text):
        character = {"\\n": "\n", "\\r": "\r", "\\t": "\t"}.get(token[0], token[0][-1])
        if token["code"]:
            code = int(token["code"][1:], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise invalid("grammar", "an escape stands for no character")
            character = chr(code)
        characters.append((character, token[0][0] == "\\"))
    return characters


def _class(text: str) -> str:
    """The inside of a class of GBNF, for a regular expression."""
    characters = _characters(text)
    out = ""
    at = 0
    while at < len(characters):
        first = last = characters[at][0]
        if characters[at + 1 : at + 2] == [("-", False)] and at + 2 < len(characters):
            at += 2
            last = characters[at][0]
        if last < first:
            raise invalid("grammar", "a class has an invalid range")
        out += regex_literal(first) if last == first else f"{regex_literal(first)}-{regex_literal(last)}"
        at += 1
    return out


def checked_lark(text: str) -> str:
    """A grammar in the form of Lark, written anew from the parts that constrain a text and do no more."""
    parts: list[str] = []
    at = 0
    while at < len(text):
        token = _token(LARK, text, at)
        at = token.end()
        kind = token.lastgroup
        if kind == "json":
            try:
                document, end = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                raise invalid("grammar", f"{token[0].strip()} is not followed by a JSON object") from None
            if token[0].startswith("%llguidance"):
                if document != {}:
                    raise invalid("grammar", "options of %llguidance are not supported")
            else:
                parts.append(f"%json {schema_text(parsed_json(text[at:end]))}")
            at = end
        elif kind == "directive" and token[0] not in DIRECTIVES:
            raise invalid("grammar", f"{token[0][:64]} is not supported")
        elif kind == "repeat":
            parts.append(_repeat(token))
        elif kind != "left_out":
            parts.append(token[0])
    if parts.count(":") > MAX_RULES:
        raise invalid("grammar", f"there are more than {MAX_RULES} rules")
    return "".join(parts)


def _repeat(token: re.Match[str]) -> str:
    least, most = token["least"], token["most"]
    if max(int(least), int(most or 0)) > MAX_REPEATS:
        raise invalid("grammar", f"a repetition has a bound above {MAX_REPEATS}")
    return "{" + least + (f",{most or ''}" if "," in token[0] else "") + "}"


def _token(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    token = pattern.match(text, at)
    if token is None:
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        raise invalid("grammar", f"line {line}, column {column}: what follows is not supported")
    return token


def _tokens(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        token = _token(pattern, text, at)
        yield token
        at = token.end()
