"""Chat templates run in processes of their own: they may hang, crash or eat memory, and only their request suffers."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.router.cluster import cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.renderings import ECHO, SOMETIMES, chat, messages, rendered
from tests.router.tokenizer_files import CHAT_TEMPLATE, tokenizer_files
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import GenerateRequest, TokenizeRequest
from trunkline_router.prompts import helper_pool
from trunkline_router.prompts.helper_pool import SHORT_PROCESSES, Helpers
from trunkline_router.prompts.helper_process import template_source

# It hangs wherever it is compiled.
HANGS_COMPILING = template_source("{{ (9 ** (9 ** 9)) % 7 }}", {})
EATS_MEMORY = template_source("{% set s = 'x' * 10000000000 %}{{ s | length }}", {})


@pytest.fixture
async def helpers() -> AsyncIterator[Helpers]:
    """Impatient: templates that end take a thousandth of this."""
    made = Helpers(render_limit_s=0.3)
    yield made
    await made.close()


def processes(helpers: Helpers) -> set[int]:
    return {renderer._process.pid for renderer in helpers.short._idle}


async def test_a_conversation_is_rendered_by_one_process_that_stays(helpers: Helpers) -> None:
    assert not processes(helpers), "none is started before there is something to render"
    assert await rendered(helpers, ECHO, chat("Grüße 🦊")) == "<s>Grüße 🦊"
    first = processes(helpers)
    for _ in range(20):
        assert await rendered(helpers, SOMETIMES, chat("a")) == "a"
        assert await rendered(helpers, ECHO, chat("b")) == "<s>b"
    assert processes(helpers) == first
    assert len(first) == 1


async def test_long_conversations_come_back_whole(helpers: Helpers) -> None:
    text = "Grüße 🦊 " * 200_000
    assert await rendered(helpers, ECHO, chat(text)) == "<s>" + text


@pytest.mark.parametrize(
    ("template", "said"),
    [
        pytest.param(SOMETIMES, "hang", id="rendering"),
        pytest.param(HANGS_COMPILING, "x", id="compiling", marks=pytest.mark.slow),
    ],
)
async def test_a_template_that_hangs_is_stopped_and_named_and_others_go_on(
    helpers: Helpers, template: bytes, said: str
) -> None:
    await rendered(helpers, ECHO, chat())
    hung = asyncio.gather(
        *(helpers.render(template, chat(said), account="hung") for _ in range(SHORT_PROCESSES + 1)),
        return_exceptions=True,
    )
    await asyncio.sleep(0)
    answers = 0
    while not hung.done():
        assert await rendered(helpers, ECHO, chat()) == "<s>hi"
        answers += not hung.done()
    assert answers, "meanwhile"
    for refused in await hung:
        assert isinstance(refused, RequestRefused)
        assert (refused.reason, refused.field) == ("INVALID_REQUEST", "chat")
        assert "chat template takes longer than 0.3 s" in refused.message
    assert await rendered(helpers, ECHO, chat()) == "<s>hi"


async def test_a_template_that_wants_all_memory_is_refused_and_its_process_goes_on(helpers: Helpers) -> None:
    await rendered(helpers, ECHO, chat())
    before = processes(helpers)
    with pytest.raises(RequestRefused, match="chat template") as caught:
        await rendered(helpers, EATS_MEMORY, chat())
    assert caught.value.field == "chat"
    assert await rendered(helpers, ECHO, chat()) == "<s>hi"
    assert processes(helpers) == before


async def test_a_refusal_crosses_the_border_as_it_is(helpers: Helpers) -> None:
    refusing = template_source("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestRefused, match="refuses the conversation: roles must alternate") as caught:
        await rendered(helpers, refusing, chat())
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "chat")
    with pytest.raises(RequestRefused, match="does not compile: No filter named"):
        await rendered(helpers, template_source("{{ 1 | nothing }}", {}), chat())
    with pytest.raises(RequestRefused, match="refuses the conversation"):
        await rendered(helpers, template_source("{{ '\\ud800' }}", {}), chat())


async def test_an_answer_of_more_than_64_mib_is_not_read(helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert helper_pool.MAX_ANSWER_BYTES == 64 << 20
    monkeypatch.setattr(helper_pool, "MAX_ANSWER_BYTES", 1 << 20)
    assert len(await rendered(helpers, ECHO, chat("x" * 1_000_000))) == 1_000_003
    before = processes(helpers)
    with pytest.raises(RequestRefused, match="chat template makes more than 1 MiB of this input") as caught:
        await rendered(helpers, ECHO, chat("x" * (1 << 20)))
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "chat")
    assert not processes(helpers), "the process that has the answer is ended"
    assert await rendered(helpers, ECHO, chat()) == "<s>hi"
    assert processes(helpers) != before


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('x' * 10000000) }}", "{{ 1 | " + "x" * 100_000 + " }}"],
    ids=["rendering", "compiling"],
)
async def test_a_template_does_not_choose_how_long_a_refusal_is(helpers: Helpers, source: str) -> None:
    with pytest.raises(RequestRefused, match="xxx") as caught:
        await rendered(helpers, template_source(source, {}), chat())
    assert len(caught.value.message) <= 500


async def test_a_process_that_was_killed_from_outside_costs_no_request(helpers: Helpers) -> None:
    for _ in range(3):
        await rendered(helpers, ECHO, chat())
        (victim,) = processes(helpers)
        os.kill(victim, signal.SIGKILL)
        assert await rendered(helpers, ECHO, chat()) == "<s>hi"
        assert victim not in processes(helpers)


def stalled_after(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process stands still after so many times its limit on CPU time."""
    monkeypatch.setattr("trunkline_router.prompts.helper_pool.STALLED_FACTOR", factor)
    monkeypatch.setattr("trunkline_router.prompts.helper_pool.LEAST_STALLED_S", 0.0)


async def test_a_process_that_stands_still_is_replaced(helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled_after(1.0, monkeypatch)
    await rendered(helpers, ECHO, chat())
    (victim,) = processes(helpers)
    os.kill(victim, signal.SIGSTOP)
    assert await rendered(helpers, ECHO, chat()) == "<s>hi"
    assert victim not in processes(helpers)


async def test_a_job_on_which_every_process_stands_still_is_refused(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled_after(0.0, monkeypatch)
    with pytest.raises(RequestRefused, match="chat template stands still") as refused:
        await rendered(helpers, ECHO, chat())
    assert (refused.value.reason, refused.value.retry_delay_ms) == ("OVERLOADED", 1000)
    assert not processes(helpers)


async def test_whoever_leaves_does_not_leave_an_answer_for_the_next_one(helpers: Helpers) -> None:
    await rendered(helpers, ECHO, chat())
    leaving = asyncio.create_task(helpers.render(ECHO, chat("secret " * 100_000)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert await rendered(helpers, ECHO, chat("mine")) == "<s>mine"


async def test_a_process_ends_with_whoever_started_it(helpers: Helpers) -> None:
    await rendered(helpers, ECHO, chat())
    (renderer,) = helpers.short._idle
    renderer._stdin.close()
    assert await asyncio.to_thread(renderer._process.wait, 10) == 0


@pytest.mark.slow
async def test_processes_start_beside_a_busy_grpc_server() -> None:
    """gRPC's fork handlers once left a started process standing still before its program began."""
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        for _ in range(20):
            helpers = Helpers()
            assert await asyncio.wait_for(rendered(helpers, ECHO, chat("hello")), 60)
            await helpers.close()
    finally:
        await server.stop(None)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the CPU time of threads is looked up in /proc")
async def test_a_small_rendering_takes_less_than_two_milliseconds_of_a_core(helpers: Helpers) -> None:
    template = template_source(CHAT_TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
    await rendered(helpers, template, chat())
    (renderer,) = processes(helpers)

    def taken_s() -> float:
        """By the event loop's thread and by the process that renders."""
        return (
            sum(int(Path(f"/proc/{one}/schedstat").read_text().split()[0]) for one in ("thread-self", renderer)) / 1e9
        )

    took_s = []
    for _ in range(200):
        before_s = taken_s()
        await rendered(helpers, template, chat("Tell me a story about a fox."))
        took_s.append(taken_s() - before_s)
    assert sorted(took_s)[100] < 0.002


def test_the_process_loads_nothing_heavy() -> None:
    code = "import sys, trunkline_router.prompts.helper_process; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"grpc", "torch", "numpy", "structlog", "opentelemetry"} & set(loaded)


async def test_a_client_is_told_that_the_template_hangs_while_others_chat() -> None:
    endless = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    workers = (
        FakeWorker("a"),
        FakeWorker("b", model="odd", files=tokenizer_files(chat_template=endless), tokenizer_digest=b"of the odd one"),
    )
    async with cluster(*workers, render_limit_s=1.0) as router:
        hung = [router.stub.Generate(GenerateRequest(chat=messages(), model="odd")) for _ in range(SHORT_PROCESSES)]
        for _ in range(3):
            assert (await router.stub.Tokenize(TokenizeRequest(chat=messages(), model="tiny"))).token_ids
        assert not any(call.done() for call in hung)
        for call in hung:
            refused = await refusal(call)
            assert (refused.reason, refused.field) == ("INVALID_REQUEST", "chat")
            assert "chat template" in refused.message
        await until(lambda: not workers[1].submits)
