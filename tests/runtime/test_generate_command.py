"""`trunkline generate`: its flags become the request's fields."""

import argparse
import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.runtime.unimplemented_service import UnimplementedService
from trunkline.sampling_params import TABLE
from trunkline.v1.generation_pb2 import FinishReason, Lane, OutputChunk
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse, PromptInfo, Usage
from trunkline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from trunkline.validation import LANES
from trunkline_cli import generate
from trunkline_runtime.server import GrpcServer


class Recorder(UnimplementedService):
    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.metadata: dict[str, str] = {}
        self.highest = Lane.LANE_INTERACTIVE  # that it grants

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        lane = max(request.lane or Lane.LANE_STANDARD, self.highest)
        yield GenerateResponse(request_id="r", prompt=PromptInfo(lane=lane), chunks=[OutputChunk(index=0, text=" the")])
        chunk = OutputChunk(index=0, text="re", finish_reason=FinishReason.FINISH_REASON_STOP)
        yield GenerateResponse(request_id="r", chunks=[chunk], usage=Usage())


@pytest.fixture
def served() -> Iterator[tuple[str, Recorder]]:
    """In a thread with a loop of its own: the command runs one itself."""
    recorder, stop = Recorder(), asyncio.Event()
    ports: list[int] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = GrpcServer("127.0.0.1", 0, services=[])
        add_InferenceServiceServicer_to_server(recorder, server.grpc)
        await server.start()
        ports.append(server.port)
        started.set()
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(30)
    yield f"127.0.0.1:{ports[0]}", recorder
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    loop.close()


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trunkline generate")
    generate.add_arguments(parser)
    return parser.parse_args(argv)


def test_every_flag_reaches_the_router(served: tuple[str, Recorder], capsys: pytest.CaptureFixture[str]) -> None:
    address, recorder = served
    assert generate.run(parse("hello", "--server", address)) == 0
    assert capsys.readouterr().out == "hello there\n"
    numbers = {name: row.example for name, row in TABLE.items() if row.kind in (int, float)}
    flags = (
        "--lane=batch", "--tenant=acme", "--session=chat-7", "--logit-bias=42=-1.5", "--logit-bias=7=100",
        "--stop-token-id=3", "--stop-token-id=4", "--stop=a", "--stop=b", "--ignore-eos", "--n=2",
        *(f"--{name.replace('_', '-')}={value}" for name, value in numbers.items()),
    )  # fmt: skip
    assert generate.run(parse("hello", "--server", address, *flags)) == 0
    plain, full = recorder.requests
    assert plain.lane == Lane.LANE_UNSPECIFIED
    assert not plain.sampling.ListFields()
    assert full.lane == Lane.LANE_BATCH
    assert dict(full.sampling.logit_bias) == {42: -1.5, 7: 100.0}
    assert list(full.sampling.stop_token_ids) == [3, 4]
    assert list(full.sampling.stop) == ["a", "b"]
    assert {name: getattr(full.sampling, name) for name in numbers} == numbers
    assert full.n == 2
    assert full.sampling.ignore_eos
    assert recorder.metadata["x-trunkline-tenant"] == "acme"
    assert recorder.metadata["x-trunkline-session"] == "chat-7"


LOWERED = "trunkline generate: runs in the {} lane: the tenants file does not grant the {} one\n"


@pytest.mark.parametrize("output", ["", "--stream", "--json"])
@pytest.mark.parametrize("asked", [None, *LANES])
@pytest.mark.parametrize("highest", LANES)
def test_a_lane_that_is_not_granted_is_said_once_on_standard_error(
    served: tuple[str, Recorder], capsys: pytest.CaptureFixture[str], highest: str, asked: str | None, output: str
) -> None:
    address, recorder = served
    recorder.highest = LANES[highest]
    flags = [*([output] if output else []), *([f"--lane={asked}"] if asked else [])]
    assert generate.run(parse("hello", "--server", address, *flags)) == 0
    is_lowered = asked is not None and LANES[asked] < LANES[highest]
    said = capsys.readouterr()
    assert said.err == (LOWERED.format(highest, asked) if is_lowered else "")
    if output != "--json":
        assert said.out == "hello there\n"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--lane=express", "invalid choice: 'express'"),
        ("--logit-bias=42", "'42' is not ID=VALUE, such as 42=-1.5"),
        ("--logit-bias=a=1", "'a=1' is not ID=VALUE"),
        ("--stop-token-id=x", "'x' is not a whole number"),
    ],
)
def test_a_flag_that_makes_no_sense_is_named(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("hello", flag)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tenant", "session"])
def test_a_name_that_cannot_travel_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.run(parse("hello", f"--{name}=müller")) == 1
    assert capsys.readouterr().err.startswith(f"trunkline generate: {name} 'müller' must be at most ")
