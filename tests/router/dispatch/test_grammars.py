"""Requests with a grammar: what is refused at once, what workers get, and what becomes of it when they are lost."""

import json
from typing import Any

import pytest
import structlog

from tests.router.api.observed import Traces
from tests.router.asked_work import Ask
from tests.router.cluster import cluster, refusal, tokens_of, until
from tests.router.direct_rig import KEY, Stream, arrival, direct
from tests.router.failover_rig import DIED, PROMPT, dies, first_of, kills_two, rest
from tests.router.fake_worker import FakeWorker
from tests.router.tokenizer_files import VOCAB_SIZE, byte_tokenizer, tokenizer_files
from tests.runtime.otlp_receiver import GENERATE
from trunkline.names import TENANT_KEY, grammar_digest
from trunkline.status import CONTEXT_LENGTH_EXCEEDED, INVALID_REQUEST, QUARANTINED, QUOTA_EXCEEDED, invalid
from trunkline.v1.fleet_pb2 import ExplainRouteRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds, Tool
from trunkline.v1.worker_pb2 import Capability, Grammar, GrammarKind, OutputKind, Work
from trunkline.validation import MAX_GRAMMAR_BYTES
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.quotas.quota import Quotas
from trunkline_router.workers.session_grammars import LEAST_BYTES

SCHEMA = Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, text='{"type": "object"}')
REGEX = Grammar(kind=GrammarKind.GRAMMAR_KIND_REGEX, text="[a-z]+")
TAG = Grammar(kind=GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG, text='{"triggers": [], "structures": []}')
CHAT = ChatMessages(messages=[ChatMessage(role="user", content="hello")])


def able(name: str, **settings: Any) -> FakeWorker:
    return FakeWorker(name, **{"answer": None, "capabilities": [Capability.CAPABILITY_GRAMMARS], **settings})


def named(grammar: Grammar) -> Work:
    """What a submit has of it."""
    return Work(grammar=Grammar(digest=grammar_digest(grammar)))


async def test_workers_get_each_grammar_once_and_its_digest_with_each_choice() -> None:
    worker = able("a", answer=3)
    async with cluster(worker) as router:
        for grammar in (SCHEMA, REGEX, SCHEMA):
            await router.answer(PROMPT, grammar=grammar, n=2)
        await router.answer(PROMPT)
    assert [submit.work for submit in worker.submits] == [named(SCHEMA)] * 2 + [named(REGEX)] * 2 + [
        named(SCHEMA)
    ] * 2 + [Work()]
    sent = [grammar for message in worker.messages for grammar in message.grammars]
    assert [(one.kind, one.text) for one in sent] == [(SCHEMA.kind, SCHEMA.text), (REGEX.kind, REGEX.text)]
    assert not worker.faults


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar(text="x"), "0 is not a known kind"),
        (Grammar(kind=99, text="x"), "99 is not a known kind"),  # type: ignore[arg-type]
        (Grammar(kind=REGEX.kind), "the text has 0 bytes"),
        (
            Grammar(kind=REGEX.kind, text="ä" * (MAX_GRAMMAR_BYTES // 2) + "x"),
            f"the text has {MAX_GRAMMAR_BYTES + 1} by",
        ),
        (Grammar(kind=REGEX.kind, text="x", digest=b"d"), "the digest must be empty"),
    ],
)
async def test_what_is_no_grammar_is_refused_by_name(grammar: Grammar, words: str) -> None:
    worker = able("a", answer=3)
    async with cluster(worker) as router:
        refused = await refusal(router.generate(PROMPT, grammar=grammar))
        assert (refused.reason, refused.field, refused.message[: len(words) + 9]) == (
            INVALID_REQUEST,
            "grammar",
            f"grammar: {words}",
        )
        longest = Grammar(kind=REGEX.kind, text="x" * MAX_GRAMMAR_BYTES)
        assert tokens_of(await router.answer(PROMPT, grammar=longest)) == [0, 1, 2]
    assert not worker.faults


async def test_a_grammar_constrains_no_vector_and_keeps_the_rest_of_the_work(ask: Ask) -> None:
    worker = able("a", answer=3, capabilities=[Capability.CAPABILITY_GRAMMARS, Capability.CAPABILITY_ADAPTERS])
    async with cluster(worker) as router:
        ask(Work(output=OutputKind.OUTPUT_KIND_VECTOR))
        refused = await refusal(router.generate(PROMPT, grammar=REGEX))
        assert (refused.field, refused.message) == (
            "grammar",
            "grammar: constrains text, but the output is a vector",
        )
        tooled = ChatMessages(messages=CHAT.messages, tools=[Tool(name="f")], requires_call=True)
        refused = await refusal(router.stub.Generate(GenerateRequest(chat=tooled)))
        assert (refused.field, refused.message[-6:]) == ("grammar", "vector")
        adapted = Work()
        adapted.adapter.id = "legal"
        ask(adapted)
        await router.answer(PROMPT, grammar=REGEX)
    (submit,) = worker.submits
    assert submit.work.adapter.id == "legal"
    assert submit.work.grammar == named(REGEX).grammar


async def test_only_workers_that_take_grammars_get_them_and_without_any_the_capability_is_named() -> None:
    workers = [FakeWorker("plain"), able("able", answer=3)]
    asked = ExplainRouteRequest(request=GenerateRequest(token_ids=TokenIds(ids=PROMPT), grammar=REGEX))
    async with cluster(*workers) as router:
        for _ in range(4):
            assert (await router.answer(PROMPT, grammar=REGEX))[0].prompt.worker_id == "able"
        assert [one.worker_id for one in (await router.fleet.ExplainRoute(asked)).candidates] == ["able"]
    assert not workers[0].submits
    async with cluster(workers[0]) as router:
        for call in (router.generate(PROMPT, grammar=REGEX), router.fleet.ExplainRoute(asked)):
            refused = await refusal(call)
            assert (refused.field, refused.message) == (
                "grammar",
                "grammar: needs the capability grammars, which no worker of model tiny has",
            )


async def test_a_stream_continues_with_its_grammar_on_another_worker() -> None:
    workers = [able("a"), able("b")]
    async with cluster(*workers) as router:
        call = router.generate(PROMPT, grammar=SCHEMA)
        begun = await first_of(workers)
        begun.tokens(3)
        begun.fail(DIED)
        await dies(router, workers, begun.worker)
        resumed = await first_of([one for one in workers if one is not begun.worker])
        assert resumed.submit.work == named(SCHEMA)
        assert resumed.worker.grammars[grammar_digest(SCHEMA)].text == SCHEMA.text
        resumed.tokens(2, finish=True)
        assert tokens_of(await rest(call)) == [0, 1, 2, 3, 4]
    assert not workers[0].faults + workers[1].faults


async def test_a_new_session_gets_the_grammar_again() -> None:
    worker = able("a", answer=3)
    async with cluster(worker) as router:
        await router.answer(PROMPT, grammar=SCHEMA)
        before = router.connected(0)
        worker.end_sessions()
        await until(lambda: router.links[0].worker not in (None, before))
        await router.answer(PROMPT, grammar=SCHEMA)
    assert sum(len(message.grammars) for message in worker.messages) == 2
    assert not worker.faults


async def test_open_requests_leave_the_room_for_grammars_to_others() -> None:
    def regex(number: int) -> Grammar:
        return Grammar(kind=REGEX.kind, text=f"{number:{MAX_GRAMMAR_BYTES}}")

    worker = able("a", grammar_bytes=MAX_GRAMMAR_BYTES + LEAST_BYTES)
    async with cluster(worker) as router:
        calls, begun = [], []
        for number in range(3):
            calls.append(router.generate(PROMPT, grammar=regex(number)))
            begun.append(await worker.arrived.get())
        for one in begun:
            one.tokens(1, finish=True)
        for call in calls:
            await rest(call)
    assert not worker.faults


async def test_a_grant_has_the_whole_grammar() -> None:
    workers = [able("a", grant_key=KEY)]
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client, grammar=SCHEMA)
        begun = await arrival(workers)
        assert begun.submit.work.grammar == Grammar(digest=grammar_digest(SCHEMA), kind=SCHEMA.kind, text=SCHEMA.text)
        begun.tokens(2, finish=True)
        await stream.task


async def test_a_grammar_that_a_worker_refuses_ends_its_request_and_blames_no_worker() -> None:
    workers = [able("a"), able("b")]
    async with cluster(*workers) as router:
        for _ in range(8):
            call = router.generate(PROMPT, grammar=REGEX)
            (await first_of(workers)).fail(invalid("grammar", "takes too long to compile"))
            refused = await refusal(call)
            assert (refused.reason, refused.field) == (INVALID_REQUEST, "grammar")
        assert all(link.breaker.is_closed for link in router.links)
    assert len(workers[0].submits) + len(workers[1].submits) == 8


async def test_a_grammar_that_a_worker_refuses_costs_its_tenant_nothing() -> None:
    worker, metadata = able("a"), ((TENANT_KEY, "acme"),)
    quotas = Quotas(requests_per_minute=1, tokens_per_minute=100)
    async with cluster(worker, tenants=Tenants({"acme": Tenant(quotas=quotas)})) as router:
        request = GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=60))
        request.grammar.CopyFrom(REGEX)
        for _ in range(3):
            call = router.stub.Generate(request, metadata=metadata)
            (await worker.arrived.get()).fail(invalid("grammar", "takes too long to compile"))
            assert (await refusal(call)).reason == INVALID_REQUEST
        call = router.stub.Generate(request, metadata=metadata)
        (await worker.arrived.get()).tokens(3, finish=True)
        await rest(call)
        assert (await refusal(router.stub.Generate(request, metadata=metadata))).reason == QUOTA_EXCEEDED


async def test_the_kind_of_a_grammar_is_noted_and_its_text_is_nowhere() -> None:
    worker, traces = able("a"), Traces()
    with structlog.testing.capture_logs() as lines:
        async with cluster(worker, observer=traces.observer) as router:
            for answer in (3, None):
                call = router.generate(PROMPT, grammar=Grammar(kind=REGEX.kind, text="secret"))
                choice = await worker.arrived.get()
                if answer:
                    choice.tokens(answer, finish=True)
                    await rest(call)
                else:
                    choice.fail(invalid("grammar", "must not contain secret"))
                    assert (await refusal(call)).message == "grammar: must not contain secret"
    assert [line["grammar"] for line in lines if line["event"] == "request ended"] == ["regex"] * 2
    assert [span.attributes["trunkline.grammar"] for span in traces.named(GENERATE)] == ["regex"] * 2
    assert "secret" not in str(lines) + str(traces.spans)


async def test_a_burst_of_forced_tokens_is_one_output() -> None:
    worker = able("a")
    async with cluster(worker) as router:
        call = router.generate(PROMPT, grammar=SCHEMA)
        choice = await worker.arrived.get()
        choice.tokens(1)
        choice.tokens(60)
        choice.tokens(39, finish=True)
        assert tokens_of(await rest(call)) == list(range(100))


async def test_a_prompt_that_kills_workers_is_refused_with_its_grammar_alone() -> None:
    workers = [able(name) for name in "abc"]
    async with cluster(*workers) as router:
        call = router.generate(PROMPT, grammar=SCHEMA)
        (left,) = await kills_two(router, workers, call)
        assert (await refusal(call)).reason == QUARANTINED
        assert (await refusal(router.generate(PROMPT, grammar=SCHEMA))).reason == QUARANTINED
        another_tenants = GenerateRequest(token_ids=TokenIds(ids=PROMPT), grammar=SCHEMA)
        for call in (
            router.generate([1, 2, 3], grammar=SCHEMA),
            router.generate(PROMPT, grammar=REGEX),
            router.generate(PROMPT),
            router.stub.Generate(another_tenants, metadata=((TENANT_KEY, "acme"),)),
        ):
            (await first_of([left])).tokens(3, finish=True)
            assert tokens_of(await rest(call)) == [0, 1, 2]


# What a model writes after its prompt, and what parts it would be without a grammar.
CALL = '{"name": "f", "parameters": {}}'
KIMI = ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"]


def chatting(template_end: str = "") -> dict[str, bytes]:
    return tokenizer_files(chat_template="{{ messages[0].content }}" + template_end)


@pytest.mark.parametrize(("format_", "text"), [("llama3_json", CALL), ("hermes", "<think>no</think>yes")])
async def test_a_constrained_answer_is_text_as_a_whole(format_: str, text: str) -> None:
    worker = able("a", answer_format=format_, files=chatting())
    async with cluster(worker) as router:
        call = router.stub.Generate(GenerateRequest(chat=CHAT, grammar=REGEX))
        choice = await worker.arrived.get()
        choice.tokens(3, text=text, finish=True)
        answers = await rest(call)
        assert not answers[0].prompt.answer_format
        assert "".join(chunk.text for answer in answers for chunk in answer.chunks) == text
        assert not any(answer.parts for answer in answers)


async def test_a_grammar_that_is_found_out_late_must_fit_on_a_worker_that_takes_it() -> None:
    """A worker without grammars has the longer context."""
    parts: dict[str, Any] = {"answer_format": "hermes", "files": chatting("<think>{{ '\n' }}")}
    workers = [
        FakeWorker("long", answer=3, context_length=1000, **parts),
        able("short", answer=3, context_length=100, **parts),
    ]
    async with cluster(*workers) as router:
        request = GenerateRequest(chat=CHAT, sampling=SamplingParams(max_tokens=200))
        await rest(router.stub.Generate(request))
        request.chat.max_reasoning_tokens = 7
        refused = await refusal(router.stub.Generate(request))
        assert (refused.reason, " 100 tokens" in refused.message) == (CONTEXT_LENGTH_EXCEEDED, True)
        request.sampling.max_tokens = 20
        await rest(router.stub.Generate(request))
    assert [len(worker.submits) for worker in workers] == [1, 1]


async def test_an_answer_with_structural_tags_has_its_parts() -> None:
    worker = able("a", answer_format="hermes", files=chatting())
    async with cluster(worker) as router:
        call = router.stub.Generate(GenerateRequest(chat=CHAT, grammar=TAG))
        (await worker.arrived.get()).tokens(3, text="<think>no</think>yes", finish=True)
        parts = [part for answer in await rest(call) for part in answer.parts]
        assert ("".join(part.reasoning for part in parts), "".join(part.text for part in parts)) == ("no", "yes")


async def test_a_grammar_begins_after_the_reasoning_that_the_prompt_begins() -> None:
    worker = able("a", answer_format="hermes", files=chatting("<think>{{ '\n' }}"))
    async with cluster(worker) as router:
        call = router.stub.Generate(GenerateRequest(chat=CHAT, grammar=REGEX))
        (await worker.arrived.get()).tokens(3, text="no</think>yes", finish=True)
        parts = [part for answer in await rest(call) for part in answer.parts]
        assert ("".join(part.reasoning for part in parts), "".join(part.text for part in parts)) == ("no", "yes")
        (submit,) = worker.submits
        reasoning, _, text = json.loads(worker.grammars[submit.work.grammar.digest].text)["format"]["elements"]
        assert (reasoning["end"], text) == ("</think>", {"type": "regex", "pattern": REGEX.text})
        call = router.stub.Generate(GenerateRequest(text="<think>", grammar=REGEX))  # no conversation
        (await worker.arrived.get()).tokens(3, finish=True)
        await rest(call)
    assert worker.submits[1].work == named(REGEX)


async def test_tools_do_not_go_with_structural_tags_unless_a_call_is_required() -> None:
    worker = able("a", answer=3, answer_format="hermes", files=chatting("{# tools #}"))
    tooled = ChatMessages(messages=CHAT.messages, tools=[Tool(name="f")])
    async with cluster(worker) as router:
        refused = await refusal(router.stub.Generate(GenerateRequest(chat=tooled, grammar=TAG)))
        assert (refused.field, "tools" in refused.message) == ("grammar", True)
        tooled.called_tool = "f"
        await rest(router.stub.Generate(GenerateRequest(chat=tooled, grammar=TAG)))
        tooled.called_tool = "g"
        refused = await refusal(router.stub.Generate(GenerateRequest(chat=tooled)))
        assert refused.field == "chat.called_tool"
    assert len(worker.submits) == 1


@pytest.mark.parametrize(
    ("format_", "banned"),
    [("hermes", ["<tool_call>"]), ("qwen_xml", ["<tool_call>"]), ("kimi_k2", KIMI), ("harmony", []), ("", [])],
)
async def test_where_calls_are_forbidden_a_token_that_begins_one_is_never_drawn(
    format_: str, banned: list[str]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<tool_call>", *KIMI])
    files = tokenizer_files(tokenizer, chat_template="{{ messages[0].content }}{# tools #}")
    worker = able("a", answer=3, answer_format=format_, files=files, vocab_size=VOCAB_SIZE + 3)
    chat = ChatMessages(messages=CHAT.messages, forbids_calls=True)
    async with cluster(worker) as router:
        for asked in (CHAT, chat):
            await rest(router.stub.Generate(GenerateRequest(chat=asked, sampling=SamplingParams(logit_bias={7: 1.0}))))
        chat.tools.add(name="f")
        refused = await refusal(router.stub.Generate(GenerateRequest(chat=chat)))
        assert refused.field == "chat.forbids_calls"
    ids = {tokenizer.token_to_id(mark): -100.0 for mark in banned}
    assert [dict(submit.sampling.logit_bias) for submit in worker.submits] == [{7: 1.0}, {7: 1.0, **ids}]


async def test_a_worker_that_keeps_less_than_one_grammar_is_not_used() -> None:
    async with cluster(able("a"), able("b", grammar_bytes=MAX_GRAMMAR_BYTES - 1), expected=(True, False)) as router:
        await until(lambda: "keeps 262143 bytes of grammars" in router.links[1].problem)
