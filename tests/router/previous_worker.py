"""A worker of the previous protocol: it speaks by the contract as it was then, which stands beside it, and by no later
field, enum or call."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import grpc_tools
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

from tests.router.tokenizer_files import EOS, VOCAB_SIZE, tokenizer_files

PROTOS = Path(__file__).with_name("protocol_1")
WELL_KNOWN = Path(grpc_tools.__file__).with_name("_proto")
SERVICE = "trunkline.v1.WorkerService"
KINDS = ("unary", "stream")
LENGTH = 2  # FINISH_REASON_LENGTH


def previous_contract() -> DescriptorPool:
    """Apart from the present one, whose messages have the same names."""
    pool = DescriptorPool()
    with TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        paths = ("trunkline/v1/generation.proto", "trunkline/v1/worker.proto")
        includes = (f"-I{PROTOS}", f"-I{WELL_KNOWN}")
        status = protoc.main(["protoc", *includes, "--include_imports", f"--descriptor_set_out={out}", *paths])
        assert status == 0, "the contract of then cannot be read"
        for file in FileDescriptorSet.FromString(out.read_bytes()).file:
            pool.Add(file)
    return pool


class PreviousWorker:
    """Each choice gets two tokens; then it ends, or, while `gives_up`, the worker drains."""

    def __init__(self, worker_id: str, fingerprint: str) -> None:
        self.worker_id = worker_id
        self.fingerprint = fingerprint
        self.gives_up = False
        self.submits: list[Any] = []
        self.address = ""
        self._pool = previous_contract()
        self._server: grpc.aio.Server | None = None

    def message(self, name: str) -> Any:
        """A class of the contract of then."""
        return GetMessageClass(self._pool.FindMessageTypeByName(f"trunkline.v1.{name}"))

    async def start(self) -> None:
        handlers = {}
        for method in self._pool.FindServiceByName(SERVICE).methods:
            behaviour = getattr(self, method.name, None)
            if behaviour is None:
                continue
            kind = f"{KINDS[method.client_streaming]}_{KINDS[method.server_streaming]}"
            make = getattr(grpc, f"{kind}_rpc_method_handler")
            handlers[method.name] = make(
                behaviour,
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def GetModel(self, request: Any, context: Any) -> Any:
        return self.message("GetModelResponse")(
            model="tiny",
            worker_id=self.worker_id,
            epoch=7,
            fingerprint=self.fingerprint,
            vocab_size=VOCAB_SIZE,
            context_length=4096,
            kv_token_capacity=4096,
            block_size=4,
            eos_token_ids=[EOS],
            tokenizer_digest=b"digest of the files",
            protocol_version=1,
        )

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for name, data in tokenizer_files().items():
            yield self.message("GetTokenizerResponse")(name=name, data=data)

    async def WatchCache(self, request: Any, context: Any) -> AsyncIterator[Any]:
        response = self.message("WatchCacheResponse")
        yield response(epoch=7, sequence=0, snapshot=self.message("CacheSnapshot")(first=True, last=True))
        yield response(epoch=7, sequence=0, load=self.message("LoadSample")(kv_free_blocks=1000))
        await asyncio.Event().wait()

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        response = self.message("SessionResponse")
        yield response(welcome=self.message("SessionWelcome")(worker_id=self.worker_id, epoch=7))
        async for request in requests:
            for submit in request.submits:
                self.submits.append(submit)
                yield response(outputs=self._outputs(submit))

    def _outputs(self, submit: Any) -> list[Any]:
        sent, bytes_sent = len(submit.resume.output_token_ids), submit.resume.text_bytes_sent
        chunk = self.message("OutputChunk")(
            index=submit.choice,
            first_token_index=sent,
            token_ids=[sent, sent + 1],
            text="xx",
            text_offset=bytes_sent,
            finish_reason=0 if self.gives_up else LENGTH,
        )
        prompt = self.message("PromptReport")(prompt_tokens=len(submit.prompt_token_ids))
        output = self.message("SequenceOutput")
        outputs = [output(handle=submit.handle, chunk=chunk, prompt=prompt)]
        if self.gives_up:
            error = self.message("RequestError")(code=14, reason="NO_WORKER", message="this worker drains")
            outputs.append(output(handle=submit.handle, error=error))
        return outputs
