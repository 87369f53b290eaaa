"""The tokenizers of all workers: those with equal files share one."""

import asyncio
from typing import TYPE_CHECKING

from trunkline.v1.worker_pb2 import GetModelResponse, GetTokenizerRequest
from trunkline_router.render_pool import RenderPool
from trunkline_router.tokenizer import PromptTokenizer, TokenizerError
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

FETCH_TIMEOUT_S = 10.0
MAX_PROBLEMS = 1024  # lives of workers with bad files that are remembered


class Tokenizers:
    """By digest of the files."""

    def __init__(self, renderers: RenderPool) -> None:
        self._renderers = renderers
        self._by_digest: dict[bytes, PromptTokenizer] = {}
        # By worker and its life: in one life its files stay as they are, and are not fetched again and again.
        self._problems: dict[tuple[str, int], str] = {}
        self._fetching = asyncio.Lock()  # a pool starts together: the first worker's files serve the others

    async def of(self, model: GetModelResponse, stub: "WorkerServiceAsyncStub") -> PromptTokenizer:
        """The worker's tokenizer, fetched where its digest is new. Raises TokenizerError."""
        async with self._fetching:
            known = self._by_digest.get(model.tokenizer_digest)
            if known is not None:
                return known
            life = (model.worker_id, model.epoch)
            if life in self._problems:
                raise TokenizerError(self._problems[life])
            files: dict[str, bytearray] = {}
            async for piece in stub.GetTokenizer(GetTokenizerRequest(), timeout=FETCH_TIMEOUT_S):
                files.setdefault(piece.name, bytearray()).extend(piece.data)
            whole = {name: bytes(data) for name, data in files.items()}
            try:
                tokenizer = await asyncio.to_thread(PromptTokenizer, whole, self._renderers)
            except TokenizerError as error:
                if len(self._problems) >= MAX_PROBLEMS:
                    self._problems.clear()
                self._problems[life] = str(error)
                raise
            self._by_digest[model.tokenizer_digest] = tokenizer
            if tokenizer.template_problem:
                problem = tokenizer.template_problem
                get_logger().warning("a model is served without chat", model=model.model, problem=problem)
            return tokenizer
