"""A direct client's Grant call to a server without that method."""

from concurrent import futures

import grpc
import pytest

from trunkline.client.grant_call import GrantCall, NotOffered
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub

# In about every sixth call the server's refusal overtakes the client's message, and grpc.aio hides its status.
CALLS = 100


async def test_a_refusal_that_overtakes_the_request_is_always_taken_as_an_offer_not_made() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = InferenceServiceStub(channel)
            for _ in range(CALLS):
                call = GrantCall(stub.Grant())
                with pytest.raises(NotOffered) as caught:
                    await call.first(GenerateRequest())
                assert caught.value.is_lasting == (str(caught.value) == "Method not found!")
                await call.close()
    finally:
        server.stop(grace=None).wait()
