"""The program of a helper process: it renders conversations, converts between text and tokens, and inspects tokenizers.

It reads jobs from standard input and answers them one at a time on standard output. A job is its length and a pickled
tuple: the job's name, the CPU time in seconds that it may take, and its arguments. Beyond that time the system ends the
process. An answer is its length, READY, ANSWER or REFUSED (a RequestError), and bytes. Answers are not pickled: a
template or a tokenizer may have taken over this process, and the router does not trust it.
"""

import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import BinaryIO, cast

from tokenizers import Tokenizer, models, processors

from trunkline.status import RequestRefused, invalid
from trunkline.v1.inference_pb2 import ChatMessages
from trunkline_router.prompts.chat_template import ChatTemplate
from trunkline_router.prompts.conversation import FIELD
from trunkline_router.prompts.token_bytes import token_bytes
from trunkline_router.prompts.tokenizer_files import described

LENGTH = struct.Struct("<I")
ANSWER_HEADER = struct.Struct("<IB")  # length, kind
READY, ANSWER, REFUSED = 1, 2, 3
TOKENIZER_FIELD = "tokenizer"  # the field that a refusal of tokenizer files names
# By job: the field that a refusal names, and what it says before the error.
PROBLEMS = {
    "render": (FIELD, "the model's chat template refuses the conversation: "),
    "load": ("model", "its tokenizer cannot be loaded: "),
    "encode": ("text", "the model's tokenizer cannot encode it: "),
    "encode_inputs": ("inputs", "the model's tokenizer cannot encode them: "),
    "offsets": ("text", "the model's tokenizer cannot encode it: "),
    "decode": ("token_ids", "the model's tokenizer cannot decode them: "),
    "token_bytes": (TOKENIZER_FIELD, "its tokens cannot be listed: "),
    "inspect": (TOKENIZER_FIELD, ""),
}
# The largest text takes up to 1.2 GiB. The sandbox does not stop a template's expression such as 'x' * 10**10.
MAX_MEMORY_BYTES = 4 << 30
MAX_REFUSAL_CHARACTERS = 500  # a template or a tokenizer can make an error's text as long as it likes
KEPT_TEMPLATES = 32  # compiled ones
TRIM_BYTES = 64 << 10  # jobs and answers of this size leave much memory behind


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router handles Ctrl-C and closes standard input
    with contextlib.suppress(ValueError, OSError):  # the system has no such limit, or a lower one
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read at each call; one text at a time needs no threads
    jobs, reader, writer = Jobs(), sys.stdin.buffer, sys.stdout.buffer
    _write(writer, READY, b"")
    while len(header := reader.read(LENGTH.size)) == LENGTH.size:
        (size,) = LENGTH.unpack(header)
        job, limit_s, arguments = pickle.loads(reader.read(size))
        # The limit is on CPU time, because a busy machine is not the template's fault. SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            kind, answer = ANSWER, getattr(jobs, job)(*arguments)
        except BaseException as error:  # the library's panics are not an Exception
            kind, answer = REFUSED, refusal(job, error).to_proto().SerializeToString()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(writer, kind, answer)
        if size + len(answer) > TRIM_BYTES:
            del arguments, answer
            _give_memory_back()


EncodedText = tuple[str, str, str | None, str]  # head, text, pair and tail of an InputText


class Jobs:
    """The jobs by name. Those on texts and tokens use the tokenizer that was loaded last."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._use(tokenizer or Tokenizer(models.BPE()))

    def render(self, template: bytes, chat: bytes) -> bytes:
        """`template` is template_source(), `chat` a serialized ChatMessages. Returns the prompt's text in UTF-8."""
        return compiled(template).render(ChatMessages.FromString(chat)).encode()

    def load(self, file: bytes) -> bytes:
        """Loads a tokenizer.json in place of the tokenizer before."""
        self._use(Tokenizer.from_buffer(file))
        return b""

    def _use(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _keep_blanks(tokenizer.post_processor)
        self._tokenizer = tokenizer

    def encode(self, text: str, special_tokens: bool) -> bytes:
        """Returns token ids (int32 in native byte order)."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        return array("i", encoding.ids).tobytes()

    def encode_inputs(self, inputs: Sequence[EncodedText], special_tokens: bool, most_tokens: int | None) -> bytes:
        """Returns for each input the numbers of its tokens, of those of its first segment, and of those that were cut
        off; then its token ids."""
        texts = [head + text + tail if pair is None else (text, pair) for head, text, pair, tail in inputs]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special_tokens)
        answer = array("i")
        for one, encoding in zip(inputs, encodings, strict=True):
            ids, types = encoding.ids, encoding.type_ids
            num_all = len(ids)
            if most_tokens is not None and num_all > most_tokens:
                ids, types = self._cut(one, special_tokens, most_tokens)
            answer.extend((len(ids), types.index(1) if 1 in types else 0, num_all - len(ids)))
            answer.extend(ids)
        return answer.tobytes()

    def _cut(self, given: EncodedText, special_tokens: bool, most_tokens: int) -> tuple[list[int], list[int]]:
        """Returns the tokens of an input, cut to fewer, and their types. Raises RequestRefused (INVALID_REQUEST) unless
        a token of the text remains, or one of each of a pair."""
        head, text, pair, tail = given
        end = self._tokenizer.encode(tail, add_special_tokens=False).ids if tail else []
        num_special = self._tokenizer.num_special_tokens_to_add(pair is not None) if special_tokens else 0
        room = most_tokens - len(end)
        if room - num_special < (1 if pair is None else 2):
            raise no_room()
        self._tokenizer.enable_truncation(room)  # leaves the special tokens in their places
        try:
            cut = self._tokenizer.encode(head + text, pair, add_special_tokens=special_tokens)
        finally:
            self._tokenizer.no_truncation()
        if all(stop <= len(head) for _, stop in cut.offsets):
            raise no_room()
        return cut.ids + end, cut.type_ids

    def offsets(self, text: str, special_tokens: bool) -> bytes:
        """Returns where each token begins in the text (int32). Those that are not in the text, such as BOS, begin where
        the token before ends."""
        starts, previous_end = array("i"), 0
        for start, end in self._tokenizer.encode(text, add_special_tokens=special_tokens).offsets:
            starts.append(start if start < end else previous_end)
            previous_end = max(previous_end, end)
        return starts.tobytes()

    def decode(self, ids: "array[int]", keep_special: bool) -> bytes:
        """Returns the text of token ids in UTF-8."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=not keep_special).encode()

    def token_bytes(self) -> bytes:
        """Returns TokenBytes.to_wire()."""
        return token_bytes(self._tokenizer).to_wire()

    def inspect(self, files: Mapping[str, bytes]) -> bytes:
        """Returns the TokenizerTraits of a worker's tokenizer files as JSON."""
        return described(files)[1].to_json()


@lru_cache(KEPT_TEMPLATES)
def compiled(template: bytes) -> ChatTemplate:
    """Raises RequestRefused (INVALID_REQUEST) if the template does not compile."""
    try:
        return ChatTemplate(**json.loads(template))
    except ValueError as error:
        raise invalid(FIELD, str(error)) from None


def template_source(source: str, special_tokens: Mapping[str, str], for_tools: str | None = None) -> bytes:
    """A chat template as it is sent to helper processes: the arguments of ChatTemplate."""
    return json.dumps({"source": source, "special_tokens": dict(special_tokens), "for_tools": for_tools}).encode()


def refusal(job: str, error: BaseException) -> RequestRefused:
    """What a client is told when a job fails."""
    field, problem = PROBLEMS[job]
    refused = error if isinstance(error, RequestRefused) else invalid(field, problem + one_line(error))
    refused.message = refused.message[:MAX_REFUSAL_CHARACTERS]
    return refused


def no_room() -> RequestRefused:
    """The refusal of a limit to which no input can be cut."""
    problem = "leaves no room for an input beside the special tokens, prompts and queries"
    return invalid("truncate_prompt_tokens", problem)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _keep_blanks(processor: processors.PostProcessor | None) -> None:
    """Lets tokens begin at their blanks, which offsets may leave out otherwise."""
    if isinstance(processor, processors.Sequence):
        for part in cast(Iterable[processors.PostProcessor], processor):  # the library's types leave __iter__ out
            _keep_blanks(part)
    elif isinstance(processor, processors.ByteLevel | processors.RobertaProcessing):
        processor.trim_offsets = False


def _write(writer: BinaryIO, kind: int, answer: bytes) -> None:
    writer.write(ANSWER_HEADER.pack(len(answer), kind))
    writer.write(answer)
    writer.flush()


def _give_memory_back() -> None:
    """Returns the memory of a long text to the system, because the C library would keep it."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
