"""The tokenizers of all workers: those with equal files share one."""

import asyncio
import re
from hashlib import sha256
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from trunkline.status import OVERLOADED, RequestRefused
from trunkline.tokenizer_digest import tokenizer_digest
from trunkline.v1.worker_pb2 import GetModelResponse, GetTokenizerRequest
from trunkline_router.claims.model_check import WorkerUnusable
from trunkline_router.prompts.encode_pool import EncoderSource
from trunkline_router.prompts.encode_process import TOKENIZER_FIELD
from trunkline_router.prompts.render_pool import RenderPool
from trunkline_router.prompts.tokenizer import PromptTokenizer, TokenizerError, damaged
from trunkline_router.prompts.tokenizer_config import CONFIG, NAMED_TEMPLATES, SPECIAL_TOKENS, TEMPLATE
from trunkline_router.prompts.tokenizer_facts import FILE, TokenizerFacts, is_tame
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

FETCH_TIMEOUT_S = 10.0
TURN_S = 1.0  # for so long a worker waits for another one that says to have the same files and sends them already
MAX_PROBLEMS = 1024  # lives of workers with bad files that are remembered
# The largest published tokenizer.json has 35 MB.
MAX_FILE_BYTES = 64 << 20
MAX_ALL_BYTES = 96 << 20
MAX_FILES = 64
NAMES = ("tokenizer.json", CONFIG, SPECIAL_TOKENS, TEMPLATE)
NAMED_TEMPLATE = re.compile(re.escape(NAMED_TEMPLATES) + r"[^/\0]{1,200}\.jinja")


class Tokenizers:
    """By digest of the files, where a worker's own digest proves to be that of what it sent; else by the files alone.
    A tokenizer is kept as long as a worker has it."""

    def __init__(self, renderers: RenderPool) -> None:
        self._renderers = renderers
        self._by_digest: WeakValueDictionary[bytes, PromptTokenizer] = WeakValueDictionary()
        self._by_files: WeakValueDictionary[bytes, PromptTokenizer] = WeakValueDictionary()
        # By worker and its life: in one life its files stay as they are, and are not fetched again and again.
        self._problems: dict[tuple[str, int, bytes], str] = {}
        # A pool starts together: the first worker's files serve the others. By digest, with how many want it.
        self._turns: dict[bytes, tuple[asyncio.Lock, int]] = {}
        self._building = asyncio.Lock()

    async def of(self, model: GetModelResponse, stub: "WorkerServiceAsyncStub") -> PromptTokenizer:
        """The worker's tokenizer, fetched where its digest is new. Raises TokenizerError."""
        digest = model.tokenizer_digest
        life = (model.worker_id, model.epoch, digest)
        turn, wanted = self._turns.get(digest, (asyncio.Lock(), 0))
        self._turns[digest] = (turn, wanted + 1)
        try:
            has_turn = await _acquired(turn)
            try:
                if (known := self._by_digest.get(digest)) is not None:
                    return known
                if life in self._problems:
                    raise TokenizerError(self._problems[life])
                return await self._made(await fetched(stub), digest, model.model, model.worker_id)
            except TokenizerError as error:
                if len(self._problems) >= MAX_PROBLEMS:
                    self._problems.clear()
                self._problems[life] = str(error)
                raise
            finally:
                if has_turn:
                    turn.release()
        finally:
            turn, wanted = self._turns.pop(digest)
            if wanted > 1:
                self._turns[digest] = (turn, wanted - 1)

    async def _made(self, files: dict[str, bytes], digest: bytes, model: str, worker: str) -> PromptTokenizer:
        """From a worker's files; the same for equal ones. Raises TokenizerError."""
        key, is_true, is_read_here = await asyncio.to_thread(_identify, files, digest)
        facts = None
        if not is_read_here and key not in self._by_files:
            facts = await self._surveyed(files, worker)
        async with self._building:
            tokenizer = self._by_files.get(key)
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(PromptTokenizer, files, self._renderers, facts)
                self._by_files[key] = tokenizer
                if problem := tokenizer.template_problem:
                    get_logger().warning("a model is served without chat", model=model, problem=problem)
        if is_true:
            self._by_digest[digest] = tokenizer
        return tokenizer

    async def _surveyed(self, files: dict[str, bytes], worker: str) -> TokenizerFacts:
        """Raises TokenizerError; WorkerUnusable where too many wait, so that it is tried again."""
        try:
            facts = await self._renderers.encoders.survey(files, worker=worker)
            await self._renderers.short_encoders.load(EncoderSource(files[FILE]), worker=worker)
            return facts
        except RequestRefused as refused:
            if refused.reason == OVERLOADED:
                raise WorkerUnusable(refused.message) from None
            raise damaged(refused.message.removeprefix(f"{TOKENIZER_FIELD}: ")) from None


async def fetched(stub: "WorkerServiceAsyncStub") -> dict[str, bytes]:
    """A worker's files by name, those that this router knows. Raises TokenizerError where they are too many or too
    large."""
    files: dict[str, bytearray] = {}
    all_bytes = 0
    call = stub.GetTokenizer(GetTokenizerRequest(), timeout=FETCH_TIMEOUT_S)
    try:
        async for piece in call:
            all_bytes += len(piece.data) + len(piece.name)
            if all_bytes > MAX_ALL_BYTES:
                raise TokenizerError(f"the worker's tokenizer files have more than {MAX_ALL_BYTES} bytes")
            if piece.name not in NAMES and not NAMED_TEMPLATE.fullmatch(piece.name):
                continue
            data = files.setdefault(piece.name, bytearray())
            data += piece.data
            if len(data) > MAX_FILE_BYTES:
                raise TokenizerError(f"the worker's {piece.name} has more than {MAX_FILE_BYTES} bytes")
            if len(files) > MAX_FILES:
                raise TokenizerError(f"the worker sends more than {MAX_FILES} tokenizer files")
    finally:
        call.cancel()  # what it still sends is not waited for
    return {name: bytes(data) for name, data in files.items()}


async def _acquired(turn: asyncio.Lock) -> bool:
    """Whether it is this one's turn; one that takes too long holds no other one up."""
    try:
        async with asyncio.timeout(TURN_S):
            return await turn.acquire()
    except TimeoutError:
        return False


def _identify(files: dict[str, bytes], digest: bytes) -> tuple[bytes, bool, bool]:
    """What is equal for equal files, and for no others; whether the worker's digest is theirs; and whether the
    tokenizer may be read and run in this process."""
    key = sha256()
    for name, data in sorted(files.items()):
        key.update(f"{name}:{len(data)}:".encode() + data)
    return key.digest(), tokenizer_digest(files) == digest, is_tame(files.get(FILE, b""))
