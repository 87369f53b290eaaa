"""Grammars in the form of Lark, as regular expressions, which constrain an argument of a call in any answer format. A
grammar whose rules refer to themselves has none. Pure."""

import json
import re
from collections.abc import Mapping

from trunkline.status import invalid

MAX_CHARACTERS = 1 << 14  # of a grammar, and of its expression, in which rules are written out wherever they are used
MAX_DEPTH = 32  # of rules

_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\.[0-9]+)?[ \t]*:(?!:)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*%import[ \t]+common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?[ \t]*$", re.MULTILINE)
_STRING = r'"(?:[^"\\\n\r]|\\[^\n\r])*"'
_TOKEN = re.compile(
    rf"""
      (?P<left_out> \s+ | //[^\n]* | \#[^\n]* | ->\s*\w+ )
    | (?P<from>{_STRING}) \s* \.\. \s* (?P<to>{_STRING})
    | (?P<string>{_STRING}) (?!i)
    | / (?P<regex> (?: [^/\\\n\r] | \\[^\n\r] )+ ) / (?![imsux])
    | (?P<name> [A-Za-z_]\w* )
    | ~ \s* (?P<least>[0-9]+) (?: \s*\.\.\s* (?P<most>[0-9]+) )?
    | (?P<mark> [()\[\]|?*+] | \{{\s*[0-9]+\s*(?:,\s*(?:[0-9]+\s*)?)?\}} )
    """,
    re.VERBOSE,
)
# The group is what has no dot that stands for others. A class without an end is one, too: workers refuse it.
_DOT = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z))|\.", re.DOTALL)
_NO_LINE_END = r"[^\n]"
_PUNCTUATION = re.compile(r"[\x00-/:-@\[-^`{-\x7f]")
_MARKS = {"(": "(?:", "[": "(?:", "]": ")?"}
_COMMON = {
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "FLOAT": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?|[0-9]+[eE][+\-]?[0-9]+)",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}


def lark_regex(text: str, field: str) -> str:
    """Returns the regular expression that matches what the rule `start` derives. Raises RequestRefused
    (INVALID_REQUEST).  field: that has the grammar"""
    return _Grammar(text, field).expression("start", MAX_DEPTH)


class _Grammar:
    def __init__(self, text: str, field: str) -> None:
        self._field = field
        if len(text) > MAX_CHARACTERS:
            raise invalid(field, f"has more than {MAX_CHARACTERS} characters")
        self._known = dict[str, str]()  # expressions
        for name, alias in _IMPORT.findall(text):
            if name not in _COMMON:
                raise invalid(field, f"common.{name[:64]} is not supported")
            self._known[alias or name] = _COMMON[name]
        head, *rules = _RULE.split(_IMPORT.sub("", text))
        self._rules: Mapping[str, str] = dict(zip(rules[::2], rules[1::2], strict=True))
        self._written("", head, 0)

    def expression(self, name: str, depth: int) -> str:
        if name not in self._known:
            if name not in self._rules:
                raise invalid(self._field, f"there is no rule `{name[:64]}`")
            if depth <= 0:
                raise invalid(self._field, f"rules refer to themselves, or are nested more than {MAX_DEPTH} deep")
            self._known[name] = self._written(name, self._rules[name], depth)
        return self._known[name]

    def _written(self, name: str, body: str, depth: int) -> str:
        parts, length, at = list[str](), 0, 0
        while at < len(body):
            token = _TOKEN.match(body, at)
            if token is None:
                raise invalid(self._field, f"rule `{name[:64]}`: {body[at : at + 16]!r} is not supported")
            parts.append(self._part(token, depth))
            length, at = length + len(parts[-1]), token.end()
            if length > MAX_CHARACTERS:
                raise invalid(self._field, f"its regular expression has more than {MAX_CHARACTERS} characters")
        return "".join(parts)

    def _part(self, token: re.Match[str], depth: int) -> str:
        if token["left_out"]:
            return ""
        if token["string"]:
            return f"(?:{self._literal(token['string'])})"
        if token["from"]:
            return f"[{self._literal(token['from'])}-{self._literal(token['to'])}]"
        if token["regex"]:
            return f"(?:{_DOT.sub(lambda found: found[1] or _NO_LINE_END, token['regex'])})"
        if token["name"]:
            return f"(?:{self.expression(token['name'], depth - 1)})"
        if token["least"]:
            return "{" + token["least"] + (f",{token['most']}" if token["most"] else "") + "}"
        return _MARKS.get(token["mark"], "".join(token["mark"].split()))

    def _literal(self, string: str) -> str:
        try:
            characters = json.loads(string)
        except ValueError:
            raise invalid(self._field, f"the string {string[:64]} has an escape that JSON does not know") from None
        return _PUNCTUATION.sub(lambda found: f"\\x{ord(found[0]):02x}", characters)
