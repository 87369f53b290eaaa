"""A process that tokenizes long texts, and turns many tokens into text: it takes seconds and hundreds of MiB.

Reads frames from standard input and answers on standard output, see frames.py. TOKENIZER makes the tokenizer known that
the frame names (tokenizer.json), instead of the one before, and is answered with LOADED. WITH_SPECIAL and PLAIN encode
a text with it (UTF-8), with and without special tokens, and are answered with IDS (int32, as the machine has them).
KEEPING and SKIPPING decode such ids, with and without the text of special tokens, and are answered with TEXT. SURVEY
brings all tokenizer files of a worker (packed) and is answered with FACTS (TokenizerFacts, as JSON). REFUSED
(RequestError) answers any. Started with the CPU seconds that a frame may take: past them the process is gone.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from array import array
from collections.abc import Mapping

from tokenizers import Tokenizer

from trunkline.status import invalid
from trunkline_router.prompts.frames import HEADER, READY, REFUSED, write_frame
from trunkline_router.prompts.tokenizer_facts import described

TOKENIZER, WITH_SPECIAL, PLAIN, KEEPING, SKIPPING, IDS, TEXT, LOADED = 1, 2, 6, 7, 8, 4, 9, 10
SURVEY, FACTS = 11, 12
TOKENIZER_FIELD = "tokenizer"  # of a refusal of files
MAX_MEMORY_BYTES = 4 << 30  # the largest text takes up to 1.2 GiB
NICENESS = 10  # the router's event loop goes first


def main() -> None:
    limit_s = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the router's: it closes standard input
    with contextlib.suppress(ValueError, OSError):  # where the system knows no such limit, or has a lower one
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    os.nice(NICENESS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read at each call: one text at a time needs no threads
    tokenizer: Tokenizer | None = None
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    write_frame(writer, READY, b"")
    while len(header := reader.read(HEADER.size)) == HEADER.size:
        size, kind, _ = HEADER.unpack(header)
        body = reader.read(size)
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process
        if kind == TOKENIZER:
            tokenizer, answer = _loaded(body)
        elif kind == SURVEY:
            answer = _surveyed(body)
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
        return tokenizer, (LOADED, b"")
    except BaseException as error:  # the library's panics are no Exception
        return None, _refused("model", f"its tokenizer cannot be loaded: {' '.join(str(error).split())}")


def _surveyed(body: bytes) -> tuple[int, bytes]:
    try:
        _, facts = described(unpacked(body))
        return FACTS, facts.to_json()
    except BaseException as error:
        return _refused(TOKENIZER_FIELD, " ".join(str(error).split()))


def packed(files: Mapping[str, bytes]) -> bytes:
    """Files as a SURVEY brings them: a line with their names and sizes, and their bytes."""
    sizes = json.dumps({name: len(data) for name, data in files.items()})
    return b"".join((sizes.encode(), b"\n", *files.values()))


def unpacked(body: bytes) -> dict[str, bytes]:
    """The files of packed()."""
    at = body.index(b"\n") + 1
    files = {}
    for name, size in json.loads(body[:at]).items():
        files[name] = body[at : at + size]
        at += size
    return files


def _answer(tokenizer: Tokenizer | None, kind: int, body: bytes) -> tuple[int, bytes]:
    assert tokenizer is not None
    try:
        if kind in (WITH_SPECIAL, PLAIN):
            (encoding,) = tokenizer.encode_batch_fast([body.decode()], add_special_tokens=kind == WITH_SPECIAL)
            return IDS, array("i", encoding.ids).tobytes()
        ids = array("i")
        ids.frombytes(body)
        return TEXT, tokenizer.decode(ids.tolist(), skip_special_tokens=kind == SKIPPING).encode()
    except BaseException as error:
        field, verb = ("text", "encode it") if kind in (WITH_SPECIAL, PLAIN) else ("token_ids", "decode them")
        return _refused(field, f"the model's tokenizer cannot {verb}: {' '.join(str(error).split())}")


def _refused(field: str, problem: str) -> tuple[int, bytes]:
    return REFUSED, invalid(field, problem).to_proto().SerializeToString()


def _give_memory_back() -> None:
    """The C library would keep what a long text took for the next one."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
