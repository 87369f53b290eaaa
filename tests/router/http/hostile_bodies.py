"""JSON bodies that cost the most to check, to parse or to free, for their length."""

from collections.abc import Callable, Mapping

BLANKS = b" " * 3900


def _list(element: bytes, num_bytes: int) -> bytes:
    """An element again and again, in a list."""
    return b'{"a":[' + element * ((num_bytes - 10) // len(element)) + b"0]}"


def _text(piece: bytes, num_bytes: int) -> bytes:
    return b'{"a":"' + piece * ((num_bytes - 10) // len(piece)) + b'"}'


def _names(num_bytes: int) -> bytes:
    """Names that all differ."""
    return b"{%b}" % b",".join(b'"%d":0' % number for number in range(1_000_000, 1_000_000 + num_bytes // 12))


def _strings(num_bytes: int) -> bytes:
    """Strings that all differ and are not ASCII."""
    numbers = range(1_000_000, 1_000_000 + num_bytes // 13)
    return b'{"a":[%b]}' % b",".join('"é%d"'.encode() % number for number in numbers)


def _mixed(num_bytes: int) -> bytes:
    """As many names, lists and digits as a large body may have, and escapes."""
    names = b",".join(b'"k%d":0' % number for number in range(min(32_000, num_bytes // 50)))
    lists = b",".join([b"[]"] * min(32_000, num_bytes // 50))
    numbers = b",".join([b"9" * 4300] * min(600, num_bytes // 10_000))
    escapes = b'\\"' * ((num_bytes - len(names) - len(lists) - len(numbers) - 40) // 2)
    return b'{"a":{%b},"b":[%b],"c":[%b],"d":"%b"}' % (names, lists, numbers, escapes)


def _nested(opening: bytes, closing: bytes, depth: int) -> Callable[[int], bytes]:
    return lambda num_bytes: _list(opening * depth + closing * depth + b",", num_bytes)


# Makers of a body of about so many bytes, by what the body is made of.
HOSTILE: Mapping[str, Callable[[int], bytes]] = {
    "numbers among blanks": lambda size: _list(b",".join([BLANKS + b"1" + BLANKS] * 15) + b',"",', size),
    "blanks": lambda size: b'{"a":' + b" " * (size - 7) + b"1}",
    "numbers of one digit": lambda size: _list(b"1,", size),
    "token ids": lambda size: _list(b"123456,", size),
    "floats": lambda size: _list(b"0.5,", size),
    "floats that are hard to round": lambda size: _list(b"2.2250738585072012e-308,", size),
    "floats of 800 digits": lambda size: _list(b"1." + b"7" * 800 + b"e-300,", size),
    "a float of millions of digits": lambda size: b'{"a":1.' + b"7" * (size - 8) + b"}",
    "integers of 20 digits": lambda size: _list(b"9" * 20 + b",", size),
    "integers of 4,300 digits": lambda size: _list(b"9" * 4300 + b",", size),
    "an integer of millions of digits": lambda size: b'{"a":' + b"9" * (size - 6) + b"}",
    "empty lists": lambda size: _list(b"[],", size),
    "empty objects": lambda size: _list(b"{},", size),
    "lists of one": lambda size: _list(b"[1],", size),
    "objects of one": lambda size: _list(b'{"":1},', size),
    "lists in lists": _nested(b"[", b"]", 60),
    "objects in objects": _nested(b'{"":', b"1}", 60),
    "lists that do not end": lambda size: b'{"a":' + b"[" * (size - 5),
    "empty strings": lambda size: _list(b'"",', size),
    "strings": _strings,
    "names": _names,
    "names, lists, long integers and escapes": _mixed,
    "a name twice, at the end": lambda size: _names(size - 14)[:-1] + b',"1000000":1}',
    "escaped line ends": lambda size: _text(b"\\n", size),
    "escaped letters": lambda size: _text(b"\\u00e9", size),
    "escaped pairs": lambda size: _text(b"\\ud83d\\ude00", size),
    "escaped quotes": lambda size: _text(b'\\"', size),
    "escaped backslashes": lambda size: _text(b"\\\\", size),
    "text": lambda size: _text(b"word, ", size),
    "text with an emoji": lambda size: _text(b"a", size - 4)[:-2] + "😀".encode() + b'"}',
    "quotes": lambda size: b'{"a":' + b'"' * (size - 5),
    "commas": lambda size: b'{"a":[' + b"," * (size - 6),
}
