"""The tokenizers of all workers. Workers with equal files share one."""

import asyncio
import re
from hashlib import sha256
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from trunkline.status import INVALID_REQUEST, RequestRefused
from trunkline.tokenizer_digest import tokenizer_digest
from trunkline.v1.worker_pb2 import GetModelResponse, GetTokenizerRequest
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import PromptTokenizer, TokenizerError, damaged
from trunkline_router.prompts.tokenizer_files import (
    CONFIG,
    NAMED_TEMPLATES,
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKENIZER,
    TokenizerTraits,
    is_cheap,
)
from trunkline_router.workers.claims import WorkerUnusable
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

FETCH_TIMEOUT_S = 10.0
TURN_S = 1.0  # how long a worker waits for another worker with the same digest whose files are being fetched
MAX_PROBLEMS = 1024  # how many workers' problems with bad files are remembered
# The largest published tokenizer.json has 35 MB.
MAX_FILE_BYTES = 64 << 20
MAX_ALL_BYTES = 96 << 20
MAX_FILES = 64
NAMES = (TOKENIZER, CONFIG, SPECIAL_TOKENS, TEMPLATE)
NAMED_TEMPLATE = re.compile(re.escape(NAMED_TEMPLATES) + r"[^/\0]{1,200}\.jinja")


class Tokenizers:
    """Finds tokenizers by the digest that a worker gives if it matches the worker's files, else by the files alone. A
    tokenizer is kept as long as a worker has it."""

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers
        self._by_digest: WeakValueDictionary[bytes, PromptTokenizer] = WeakValueDictionary()
        self._by_files: WeakValueDictionary[bytes, PromptTokenizer] = WeakValueDictionary()
        # By worker, epoch and digest: files do not change within an epoch, so bad ones are not fetched again.
        self._problems: dict[tuple[str, int, bytes], str] = {}
        # By digest, as long as a worker waits: when a pool starts, the first worker's files serve the others.
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._building = asyncio.Lock()

    async def of(self, model: GetModelResponse, stub: "WorkerServiceAsyncStub") -> PromptTokenizer:
        """The worker's tokenizer, which is fetched if its digest is new. Raises TokenizerError if its files cannot be
        used, and WorkerUnusable if they cannot be inspected now."""
        digest = model.tokenizer_digest
        life = (model.worker_id, model.epoch, digest)
        turn = self._turns.setdefault(digest, asyncio.Lock())
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

    async def _made(self, files: dict[str, bytes], digest: bytes, model: str, worker: str) -> PromptTokenizer:
        """The tokenizer of a worker's files, shared by equal files. Raises TokenizerError or WorkerUnusable."""
        key, is_true, is_read_here = await asyncio.to_thread(_identify, files, digest)
        traits = None
        if not is_read_here and key not in self._by_files:
            traits = await self._inspected(files, worker)
        async with self._building:
            tokenizer = self._by_files.get(key)
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(PromptTokenizer, files, self._helpers, traits)
                self._by_files[key] = tokenizer
                if problem := tokenizer.template_problem:
                    get_logger().warning("a model is served without chat", model=model, problem=problem)
        if is_true:
            self._by_digest[digest] = tokenizer
        return tokenizer

    async def _inspected(self, files: dict[str, bytes], worker: str) -> TokenizerTraits:
        """Raises TokenizerError, or WorkerUnusable if the router is too busy, so that the worker is tried again."""
        try:
            return await self._helpers.inspect(files, worker=worker)
        except RequestRefused as refused:
            if refused.reason != INVALID_REQUEST:
                raise WorkerUnusable(refused.message) from None
            raise damaged(refused.message.removeprefix(f"{refused.field}: ")) from None


async def fetched(stub: "WorkerServiceAsyncStub") -> dict[str, bytes]:
    """A worker's tokenizer files by name, without those that a router does not use. Raises TokenizerError if they are
    too many or too large."""
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
        call.cancel()  # does not wait for the rest
    return {name: bytes(data) for name, data in files.items()}


async def _acquired(turn: asyncio.Lock) -> bool:
    """Waits up to TURN_S for the lock and returns whether it was acquired."""
    try:
        async with asyncio.timeout(TURN_S):
            return await turn.acquire()
    except TimeoutError:
        return False


def _identify(files: dict[str, bytes], digest: bytes) -> tuple[bytes, bool, bool]:
    """Returns a digest of the files, whether the worker's own digest matches them, and whether the tokenizer is cheap
    enough to be read and run in this process."""
    key = sha256()
    for name, data in sorted(files.items()):
        key.update(f"{name}:{len(data)}:".encode() + data)
    return key.digest(), tokenizer_digest(files) == digest, is_cheap(files.get(TOKENIZER, b""))
