"""Regular expressions in the dialect that ECMA-262, Python's `re` and Rust's `regex` read alike.

llguidance reads Rust's dialect, which gives a few spellings another meaning (`[a&&b]`, `\\d` of all scripts, `a*+`). So
an expression is written anew, in spellings that mean one thing. Where the dialects differ in characters, the result
accepts only what all of them accept: what it produces matches in each.
"""

import re

from trunkline.status import RequestRefused, invalid

MAX_GROUP_DEPTH = 32
MAX_PLACES = 20_000  # after all counted repetitions are written out: `(a{100}b){10}` has 1,010

TOKEN = re.compile(
    r"""
      (?P<open> \( (?: \?: | \?P?<[A-Za-z_][A-Za-z0-9_]*> | (?!\?) ) )
    | (?P<close> \) )
    | (?P<mark> [|^$] )
    | (?P<dot> \. )
    | (?P<quantifier> (?P<times> [*+?] | \{ (?P<least>[0-9]{1,6}) (?: ,(?P<most>[0-9]{1,6})? )? \} ) \?? )
    | (?P<unsupported> \(\? | \{ (?: [0-9]*,?[0-9]+ | [0-9]+, ) \} )
    | (?P<class> \[\^? )
    | (?P<backslash> \\ )
    | (?P<literal> . )
    """,
    re.VERBOSE | re.DOTALL,
)
ESCAPE = re.compile(
    r"""
      (?P<set> [dDwWsS] )
    | (?P<property> [pP]\{[A-Za-z0-9_=]{1,64}\} )
    | (?P<control> [nrtfv] )
    | (?P<nul> 0(?![0-9]) )
    | u(?P<high> [dD][89abAB][0-9a-fA-F]{2} ) \\u(?P<low> [dD][c-fC-F][0-9a-fA-F]{2} )
    | (?: x(?P<hex2>[0-9a-fA-F]{2}) | u(?P<hex4>[0-9a-fA-F]{4}) )
    | (?P<punctuation> [!-/:-@\[-`{-~\ ] )
    """,
    re.VERBOSE,
)
SPACES = r" \t\n\r\f\v"  # that all dialects call spaces
ALL_SPACES = r"\s\x{1c}-\x{1f}\x{85}\x{feff}"  # that any dialect does
ALL_WORDS = r"\p{Alphabetic}\p{L}\p{M}\p{N}\p{Pc}\p{Join_Control}"
# What goes into a class: what all dialects agree upon; and, inside of a negated class, what any dialect includes.
SETS = {
    "d": ("0-9", r"\p{Nd}"),
    "D": (r"\P{Nd}", "[^0-9]"),
    "w": ("0-9A-Za-z_", ALL_WORDS),
    "W": (f"[^{ALL_WORDS}]", "[^0-9A-Za-z_]"),
    "s": (SPACES, ALL_SPACES),
    "S": (f"[^{ALL_SPACES}]", f"[^{SPACES}]"),
}
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # those whose only form in JSON is \u00XX
END = ("]", True)
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}


def portable_regex(regex: str, where: str = "") -> str:
    """`regex` in Rust's dialect. `where` begins the messages of refusals."""
    return _Writer(regex, where).write()


class _Writer:
    def __init__(self, regex: str, where: str) -> None:
        self._regex = regex
        self._where = where
        self._at = 0
        self._out: list[str] = []
        self._sizes = [0]  # of the groups that are open, in places; the first is the whole
        self._atom = 0  # size of what a quantifier would repeat; 0: nothing

    def write(self) -> str:
        while self._at < len(self._regex):
            token = TOKEN.match(self._regex, self._at)
            assert token is not None
            self._at = token.end()
            match token.lastgroup:
                case "open":
                    self._out.append("(?:")
                    self._sizes.append(0)
                    self._atom = 0
                    if len(self._sizes) > MAX_GROUP_DEPTH:
                        raise self._refused("groups are nested too deeply")
                case "close":
                    if len(self._sizes) == 1:
                        raise self._refused("a group is closed that was not opened")
                    self._append(")", size=max(1, self._sizes.pop()))
                case "mark":
                    self._out.append(token[0])
                    self._atom = 0
                case "quantifier":
                    self._repeat(token)
                case "unsupported":
                    raise self._refused("look-around, flags, other groups with (? and {,n} are not supported")
                case kind:
                    self._append(self._character(kind, token[0]))
        if len(self._sizes) > 1:
            raise self._refused("a group is not closed")
        return "".join(self._out)

    def _append(self, text: str, size: int = 1) -> None:
        self._out.append(text)
        self._atom = size
        self._grow(size)

    def _grow(self, size: int) -> None:
        self._sizes[-1] += size
        if sum(self._sizes) > MAX_PLACES:
            raise self._refused(f"it has more than {MAX_PLACES} places, or its repetitions are too many")

    def _repeat(self, token: re.Match[str]) -> None:
        if self._atom == 0:
            raise self._refused("a quantifier must follow what it repeats")
        least, most = int(token["least"] or 0), int(token["most"] or token["least"] or 1)
        if most < least:
            raise self._refused("a repetition has a minimum above its maximum")
        self._grow(self._atom * (max(1, most) - 1))
        self._atom = 0
        # Whether it is lazy does not matter, since a match is a match of the whole.
        self._out.append(token["times"])

    def _character(self, kind: str | None, token: str) -> str:
        match kind:
            case "dot":
                return r"[^\n\r\x{2028}\x{2029}]"
            case "class":
                return token + self._members(token == "[^") + "]"
            case "backslash":
                text, is_set = self._escaped(False)
                return f"[{text}]" if is_set else self._plain(text)
        return self._plain(token)

    def _plain(self, character: str) -> str:
        if CONTROL.match(character):
            raise self._refused("control characters are not supported")
        return regex_literal(self._scalar(character))

    def _members(self, negated: bool) -> str:
        """The inside of a class, up to its end."""
        out: list[str] = []
        is_control = not negated  # whether nothing but control characters was found
        while (member := self._member(negated)) != END:
            text, is_set = member
            if self._regex[self._at : self._at + 1] != "-" or self._regex[self._at + 1 : self._at + 2] == "]":
                out.append(text if is_set else regex_literal(text))
                is_control &= not is_set and CONTROL.match(text) is not None
                continue
            self._at += 1
            last, last_is_set = self._member(negated)
            if is_set or last_is_set or text > last:
                raise self._refused("a class has an invalid range")
            out.append(f"{regex_literal(text)}-{regex_literal(last)}")
            is_control &= last < " " and CONTROL.match(last) is not None
        if not out:
            raise self._refused("an empty class [] is not supported")
        if is_control:
            raise self._refused("control characters are not supported")
        return "".join(out)

    def _member(self, negated: bool) -> tuple[str, bool]:
        """The next character of a class and False, or a set as text and True, or END."""
        character = self._regex[self._at : self._at + 1]
        self._at += 1
        if character == "":
            raise self._refused("a class is not closed")
        if character == "]":
            return END
        if character != "\\":
            return self._scalar(character), False
        if self._regex[self._at : self._at + 1] == "b":
            self._at += 1
            return "\b", False
        return self._escaped(negated)

    def _escaped(self, negated: bool) -> tuple[str, bool]:
        """The character after a backslash and False, or a set as the text of a class and True."""
        escape = ESCAPE.match(self._regex, self._at)
        if escape is None:
            name = self._regex[self._at : self._at + 1]
            raise self._refused(f"the escape \\{name} is not supported" if name.isascii() else "an escape is unknown")
        self._at = escape.end()
        match escape.lastgroup:
            case "set":
                return SETS[escape[0]][negated], True
            case "property":
                return "\\" + escape[0], True
            case "control":
                return CONTROLS[escape[0]], False
            case "nul":
                return "\0", False
            case "low":
                high, low = int(escape["high"], 16), int(escape["low"], 16)
                return chr(0x10000 + ((high - 0xD800) << 10) + low - 0xDC00), False
            case "punctuation":
                return escape[0], False
            case _:
                return self._scalar(chr(int(escape["hex2"] or escape["hex4"], 16))), False

    def _scalar(self, character: str) -> str:
        if "\ud800" <= character <= "\udfff":
            raise self._refused("a surrogate is no character")
        return character

    def _refused(self, why: str) -> RequestRefused:
        return invalid("grammar", f"{self._where}regular expression: {why}")


def regex_literal(character: str) -> str:
    """The expression that matches this character alone, in a class and outside of one."""
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
