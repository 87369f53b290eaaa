"""A worker that computes nothing and serves vLLM's gRPC, for gateways that speak it, with a message per token.

usage: python -m trunkline_bench.streaming.vllm_source [--steps-per-s 20]     (prints its port)

Like vLLM's own server it sends ids, which the gateway turns into text. Each token is one letter that names the step in
which it was due, so that a client can compute the token's age.
"""

import asyncio
import json
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_bench.streaming.letters import LETTERS, letter_place
from trunkline_bench.streaming.source import LONG, Pace, main


class VllmSource(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # has no types
    def __init__(self, steps_per_s: float) -> None:
        self._steps_per_s = steps_per_s
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        vocabulary = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
        self._vocab_size: int = config["vocab_size"]
        self._letter_ids: list[int] = [vocabulary[letter] for letter in LETTERS]

    async def Generate(self, request: Any, context: Any) -> None:
        pace = Pace(self._steps_per_s)
        prompt_tokens, max_tokens = len(request.tokenized.input_ids), request.sampling_params.max_tokens
        output_ids = []
        for sent in range(1, max_tokens + 1):
            due_s = await pace.next_step()
            step = round(due_s * self._steps_per_s) if self._steps_per_s else sent
            output_ids.append(token_id := self._letter_ids[letter_place(step)])
            chunk = vllm_engine_pb2.GenerateStreamChunk(
                token_ids=(token_id,), prompt_tokens=prompt_tokens, completion_tokens=sent
            )
            await context.write(vllm_engine_pb2.GenerateResponse(chunk=chunk))
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=output_ids, finish_reason="length", prompt_tokens=prompt_tokens, completion_tokens=max_tokens
        )
        await context.write(vllm_engine_pb2.GenerateResponse(complete=complete))

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=str(DEMO_MODEL),
            served_model_name="source",
            is_generation=True,
            max_context_length=LONG,
            max_req_input_len=LONG,
            vocab_size=self._vocab_size,
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            eos_token_ids=[1],
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetServerInfoResponse(server_type="vllm-grpc")

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        """Sends no events, but answers: otherwise the gateway considers the worker unreachable."""
        await context.send_initial_metadata(())
        await asyncio.Event().wait()


def add_source(server: grpc.aio.Server, steps_per_s: float) -> None:
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmSource(steps_per_s), server)


if __name__ == "__main__":
    main(__doc__, add_source)
