"""A process that tokenizes long texts and turns many tokens into text, which takes seconds and hundreds of MiB.

It reads frames from standard input and answers on standard output (frames.py):

- TOKENIZER loads a tokenizer.json in place of the previous one; answer: LOADED.
- WITH_SPECIAL and PLAIN encode a UTF-8 text with and without special tokens; answer: IDS (int32 in native byte order).
- OFFSETS_WITH_SPECIAL and OFFSETS_PLAIN do the same; answer: OFFSETS, where each token begins in the text (int32).
- KEEPING and SKIPPING decode such ids with and without the text of special tokens; answer: TEXT.
- TOKEN_BYTES makes the table of all tokens' bytes; answer: TABLE (TokenBytes.to_wire()).
- INSPECT carries all tokenizer files of a worker (packed); answer: TRAITS (TokenizerTraits as JSON).

Any of them can be answered with REFUSED (RequestError). The argument is the CPU time in seconds that one frame may
take; beyond it, the system ends the process.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import cast

from tokenizers import Tokenizer, processors

from trunkline.status import invalid
from trunkline_router.prompts.frames import HEADER, READY, REFUSED, write_frame
from trunkline_router.prompts.token_bytes import token_bytes
from trunkline_router.prompts.tokenizer_traits import described

TOKENIZER, WITH_SPECIAL, PLAIN, KEEPING, SKIPPING, IDS, TEXT, LOADED = 1, 2, 6, 7, 8, 4, 9, 10
INSPECT, TRAITS = 11, 12
TOKEN_BYTES, TABLE = 13, 14
OFFSETS_WITH_SPECIAL, OFFSETS_PLAIN, OFFSETS = 15, 16, 17
ENCODES = (WITH_SPECIAL, PLAIN, OFFSETS_WITH_SPECIAL, OFFSETS_PLAIN)
TOKENIZER_FIELD = "tokenizer"  # the field that a refusal of tokenizer files names
MAX_MEMORY_BYTES = 4 << 30  # the largest text takes up to 1.2 GiB
NICENESS = 10  # the router's event loop goes first


def main() -> None:
    limit_s = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router handles Ctrl-C and closes standard input
    with contextlib.suppress(ValueError, OSError):  # the system has no such limit, or a lower one
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    os.nice(NICENESS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read at each call; one text at a time needs no threads
    tokenizer: Tokenizer | None = None
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    write_frame(writer, READY, b"")
    while len(header := reader.read(HEADER.size)) == HEADER.size:
        size, kind, _ = HEADER.unpack(header)
        body = reader.read(size)
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process
        if kind == TOKENIZER:
            tokenizer, answer = _loaded(body)
        elif kind == INSPECT:
            answer = _inspected(body)
        elif kind == TOKEN_BYTES:
            answer = _table(tokenizer)
        else:
            answer = _answer(tokenizer, kind, body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(writer, *answer)
        del body, answer
        _give_memory_back()


def _loaded(file: bytes) -> tuple[Tokenizer | None, tuple[int, bytes]]:
    try:
        tokenizer = Tokenizer.from_buffer(file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _keep_blanks(tokenizer.post_processor)
        return tokenizer, (LOADED, b"")
    except BaseException as error:  # the library's panics are not an Exception
        return None, _refused("model", f"its tokenizer cannot be loaded: {' '.join(str(error).split())}")


def _keep_blanks(processor: processors.PostProcessor | None) -> None:
    """Lets tokens begin at their blanks, which offsets may leave out otherwise."""
    if isinstance(processor, processors.Sequence):
        for part in cast(Iterable[processors.PostProcessor], processor):  # the library's types leave __iter__ out
            _keep_blanks(part)
    elif isinstance(processor, processors.ByteLevel | processors.RobertaProcessing):
        processor.trim_offsets = False


def _inspected(body: bytes) -> tuple[int, bytes]:
    try:
        _, traits = described(unpacked(body))
        return TRAITS, traits.to_json()
    except BaseException as error:
        return _refused(TOKENIZER_FIELD, " ".join(str(error).split()))


def packed(files: Mapping[str, bytes]) -> bytes:
    """The body of an INSPECT frame: one line with the files' names and sizes as JSON, then their bytes."""
    sizes = json.dumps({name: len(data) for name, data in files.items()})
    return b"".join((sizes.encode(), b"\n", *files.values()))


def unpacked(body: bytes) -> dict[str, bytes]:
    """The inverse of packed()."""
    at = body.index(b"\n") + 1
    files = {}
    for name, size in json.loads(body[:at]).items():
        files[name] = body[at : at + size]
        at += size
    return files


def _table(tokenizer: Tokenizer | None) -> tuple[int, bytes]:
    assert tokenizer is not None
    try:
        return TABLE, token_bytes(tokenizer).to_wire()
    except BaseException as error:
        return _refused(TOKENIZER_FIELD, f"its tokens cannot be listed: {' '.join(str(error).split())}")


def _answer(tokenizer: Tokenizer | None, kind: int, body: bytes) -> tuple[int, bytes]:
    assert tokenizer is not None
    try:
        if kind in (WITH_SPECIAL, PLAIN):
            (encoding,) = tokenizer.encode_batch_fast([body.decode()], add_special_tokens=kind == WITH_SPECIAL)
            return IDS, array("i", encoding.ids).tobytes()
        if kind in (OFFSETS_WITH_SPECIAL, OFFSETS_PLAIN):
            (encoding,) = tokenizer.encode_batch([body.decode()], add_special_tokens=kind == OFFSETS_WITH_SPECIAL)
            return OFFSETS, _starts(encoding.offsets).tobytes()
        ids = array("i")
        ids.frombytes(body)
        return TEXT, tokenizer.decode(ids.tolist(), skip_special_tokens=kind == SKIPPING).encode()
    except BaseException as error:
        field, verb = ("text", "encode it") if kind in ENCODES else ("token_ids", "decode them")
        return _refused(field, f"the model's tokenizer cannot {verb}: {' '.join(str(error).split())}")


def _starts(offsets: Iterable[tuple[int, int]]) -> "array[int]":
    """Returns where tokens begin. Those that are not in the text, such as BOS, begin where the token before ends."""
    starts, previous_end = array("i"), 0
    for start, end in offsets:
        starts.append(start if start < end else previous_end)
        previous_end = max(previous_end, end)
    return starts


def _refused(field: str, problem: str) -> tuple[int, bytes]:
    return REFUSED, invalid(field, problem).to_proto().SerializeToString()


def _give_memory_back() -> None:
    """Returns the memory of a long text to the system, because the C library would keep it."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
