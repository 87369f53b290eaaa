"""POST /v1/responses with tools, calls of them, their results and earlier reasoning."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.loop_work import watched_loop
from tests.router.responses.responses_client import STOP, Json, Keys, bearer, client, error_of, new_store, prompt_of
from tests.router.tokenizer_files import tokenizer_files
from trunkline.v1.worker_pb2 import Capability
from trunkline_router.access.access import Access
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.responses.response_store import StoredResponse

# Writes what it is given, in short.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ reasoning_effort }}{{ enable_thinking }}"
    "{% for message in messages %}<s>{{ message.role }}:"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}"
    "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}{{ message.tool_call_id }}</s>{% endfor %}<s>assistant:"
)
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True}
END = "<s>assistant:"


def hermes(capabilities: Sequence["Capability.ValueType"] = (Capability.CAPABILITY_GRAMMARS,)) -> FakeWorker:
    files = tokenizer_files(chat_template=TEMPLATE)
    return FakeWorker("w", answer=None, answer_format="hermes", files=files, capabilities=[*capabilities])


async def answered(worker: FakeWorker, asking: Any, text: str) -> Any:
    """What is asked, answered by the worker with this text."""
    asked = asyncio.create_task(asking)
    (await worker.arrived.get()).tokens(1, text=text, finish=True, ending=STOP)
    return await asked


def call(arguments: str = '{"place": "Graz"}', name: str = "c1", **more: Any) -> Json:
    called = {"call_id": name, "name": "weather", "arguments": arguments, **more}
    return {"type": "function_call", "id": "fc_1", **called, "parsed_arguments": {}}  # as openai's parse() returns it


def result(output: Any = "rain", name: str = "c1") -> Json:
    return {"type": "function_call_output", "call_id": name, "output": output}


def reasoning(text: str, **more: Any) -> Json:
    return {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        **more,
        "content": [{"type": "reasoning_text", "text": text}],
    }


def says(text: str, role: str = "assistant") -> Json:
    return {"role": role, "content": text}


INPUTS: dict[str, tuple[list[Json], str]] = {
    "a call and its result": (
        [says("hi", "user"), call(), result()],
        '<s>user:hi</s><s>assistant:[c1 weather {"place": "Graz"}]</s><s>tool:rainc1</s>',
    ),
    "one turn of reasoning, text and parallel calls": (
        [
            reasoning("Hm.", encrypted_content="x", status="completed"),
            says("I ask."),
            call(),
            call("{}", "c2"),
            result([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
            result("", "c2"),
        ],
        '<s>assistant:(Hm.)I ask.[c1 weather {"place": "Graz"}][c2 weather {}]</s><s>tool:a\nbc1</s><s>tool:c2</s>',
    ),
    "turns between results stay apart": (
        [call(), result(), call(name="c2"), result("sun", "c2"), says("Sun."), says("Thanks.", "user")],
        '<s>assistant:[c1 weather {"place": "Graz"}]</s><s>tool:rainc1</s>'
        '<s>assistant:[c2 weather {"place": "Graz"}]</s><s>tool:sunc2</s><s>assistant:Sun.</s><s>user:Thanks.</s>',
    ),
    "a summary in the place of the reasoning": (
        [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}]}, says("Yes.")],
        "<s>assistant:(In short.)Yes.</s>",
    ),
    "reasoning that only its server can read": (
        [says("hi", "user"), {"type": "reasoning", "summary": [], "encrypted_content": "x"}, says("ho", "user")],
        "<s>user:hi</s><s>user:ho</s>",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
async def test_items_become_the_turns_of_the_conversation(name: str) -> None:
    items, prompt = INPUTS[name]
    worker = hermes()
    async with client(worker) as responses:
        await answered(worker, responses.response(input=items), "ok")
    assert prompt_of(worker.submits[0]) == prompt + END


async def test_the_template_gets_the_tools_and_the_response_repeats_them() -> None:
    worker = hermes()
    async with client(worker) as responses:
        response = await answered(worker, responses.response(tools=[WEATHER], tool_choice="auto"), "ok")
        bare_tool = {"type": "function", "name": "now"}
        bare = await answered(worker, responses.response(tools=[bare_tool], parallel_tool_calls=False), "ok")
    assert response["tools"] == [WEATHER]
    assert bare["tools"] == [{**bare_tool, "description": None, "parameters": None, "strict": None}]
    assert (response["parallel_tool_calls"], bare["parallel_tool_calls"]) == (True, False)
    written, _, _ = prompt_of(worker.submits[0]).partition("<s>")
    function = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
    assert json.loads(written) == [{"type": "function", "function": function}]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Graz"}}\n</tool_call>'


async def test_a_model_that_may_not_call_is_not_told_of_tools_and_its_calls_are_text() -> None:
    worker = hermes()
    async with client(worker) as responses:
        for choice in ("none", {"type": "none"}):
            response = await answered(worker, responses.response(tools=[WEATHER], tool_choice=choice), CALL)
            assert [item["type"] for item in response["output"]] == ["message"]
            assert response["output"][0]["content"][0]["text"] == CALL
            assert (response["tool_choice"], response["tools"]) == ("none", [WEATHER])
    assert prompt_of(worker.submits[0]) == f"<s>user:hi</s>{END}"


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
PATCH: Json = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
PATCHED = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin Patch"}}\n</tool_call>'


async def test_a_custom_tool_is_told_as_one_with_a_text_and_called_with_it() -> None:
    worker = hermes()
    async with client(worker) as responses:
        response = await answered(worker, responses.response(tools=[PATCH, WEATHER]), PATCHED + CALL)
        whole, other = response["output"]
        assert {**whole, "id": "", "call_id": ""} == {
            **{"id": "", "type": "custom_tool_call", "status": "completed", "call_id": ""},
            **{"name": "apply_patch", "input": "*** Begin Patch"},
        }
        assert other["type"] == "function_call"
        assert response["tools"] == [PATCH, WEATHER]
        told, _, _ = prompt_of(worker.submits[0]).partition("<s>")
        [argument] = json.loads(told)[0]["function"]["parameters"]["properties"].values()
        assert GRAMMAR["definition"] in argument["description"]

        events = await answered(worker, responses.streamed(tools=[PATCH]), PATCHED)
        names = [event["type"].removeprefix("response.") for event in events]
        assert names[2:-1] == [
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
        ]
        assert [events[index]["item"]["input"] for index in (2, -2)] == ["", "*** Begin Patch"]
        assert (events[3]["delta"], events[4]["input"]) == ("*** Begin Patch", "*** Begin Patch")

        output = {"type": "custom_tool_call_output", "call_id": whole["call_id"], "output": "Done."}
        await answered(worker, responses.response(tools=[PATCH], input=[whole, output]), "ok")
        turns = prompt_of(worker.submits[-1]).partition("<s>")[2]
        called = f'[{whole["call_id"]} apply_patch {{"input": "*** Begin Patch"}}]'
        assert turns == f"assistant:{called}</s><s>tool:Done.{whole['call_id']}</s>{END}"


async def test_the_grammar_of_a_custom_tool_is_enforced_where_workers_can() -> None:
    asked: Json = {"tools": [PATCH, {**WEATHER, "strict": False}]}
    for worker in (hermes(), hermes([])):
        async with client(worker) as responses:
            await answered(worker, responses.response(**asked), PATCHED)
        (submit,) = worker.submits
        assert submit.work.HasField("grammar") == bool(worker.grammars)
    recursive = {**PATCH, "format": {**GRAMMAR, "definition": 'start: "a" start?'}}
    worker = hermes()
    async with client(worker) as responses:
        await answered(worker, responses.response(tools=[recursive]), PATCHED)
        refused = await responses.refusal(tools=[recursive], tool_choice="required")
        assert refused["param"] == "tools[0].format.definition"
    [grammar] = worker.grammars.values()
    assert "pattern" not in grammar.text


async def test_a_call_of_a_custom_tool_that_is_cut_off_has_no_input() -> None:
    worker = hermes()
    async with client(worker) as responses:
        response = await answered(worker, responses.response(tools=[PATCH]), PATCHED[:70])
    [cut] = response["output"]
    assert (cut["type"], cut["status"], cut["input"]) == ("custom_tool_call", "incomplete", "")


async def test_tools_that_run_at_no_client_are_left_out_and_named_or_refused() -> None:
    tools = [{"type": "namespace", "name": "agents", "tools": [WEATHER]}, WEATHER, {"type": "web_search", "x": 1}]
    worker = hermes()
    async with client(worker) as responses:
        asked = asyncio.create_task(responses.post(tools=tools))
        (await worker.arrived.get()).tokens(1, text="ok", finish=True, ending=STOP)
        answer = await asked
        assert answer.headers["x-trunkline-warning"] == "ignored fields: tools[0], tools[2]"
        assert answer.json()["tools"] == [WEATHER]
        told, _, _ = prompt_of(worker.submits[0]).partition("<s>")
        assert [tool["function"]["name"] for tool in json.loads(told)] == ["weather"]
    async with client(hermes(), edge=partial(Edge, refuses_server_tools=True)) as responses:
        assert (await responses.refusal(tools=tools))["param"] == "tools[0]"


NAMED = {"type": "function", "name": "weather"}
CHOICES: list[tuple[Any, bool]] = [
    ("required", True),
    (NAMED, True),
    ({"type": "allowed_tools", "mode": "required", "tools": [NAMED]}, True),
    ({"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}, False),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}, NAMED]}, True),
]


@pytest.mark.parametrize(("choice", "is_required"), CHOICES)
async def test_a_choice_of_tools_becomes_a_grammar_and_is_repeated(choice: Any, is_required: bool) -> None:
    worker, now = hermes(), {"type": "function", "name": "now"}
    lax = {**WEATHER, "strict": False}
    async with client(worker) as responses:
        response = await answered(worker, responses.response(tools=[lax, now], tool_choice=choice), CALL)
    assert response["tool_choice"] == choice
    assert [item["type"] for item in response["output"]] == ["function_call"]
    (submit,) = worker.submits
    assert submit.work.HasField("grammar") == is_required
    if is_required:
        text = worker.grammars[submit.work.grammar.digest].text
        assert "weather" in text
        assert ("now" in text) == (choice == "required")


@pytest.mark.parametrize(("parallel", "number"), [(None, 2), (True, 2), (False, 1)])
async def test_without_parallel_calls_there_is_one(parallel: bool | None, number: int) -> None:
    worker = hermes()
    async with client(worker) as responses:
        asking = responses.response(tools=[WEATHER], parallel_tool_calls=parallel)
        response = await answered(worker, asking, CALL * 2)
    assert [item["type"] for item in response["output"]] == ["function_call"] * number


async def test_the_effort_of_reasoning_is_a_variable_of_the_template() -> None:
    worker = hermes()
    async with client(worker) as responses:
        low: Json = {"reasoning": {"effort": "low", "summary": "detailed", "context": "auto"}}
        response = await answered(worker, responses.response(**low), "ok")
        await answered(worker, responses.response(reasoning={"effort": "none"}), "ok")
        kwargs: Json = {"chat_template_kwargs": {"reasoning_effort": "high"}}
        await answered(worker, responses.response(**low, **kwargs), "ok")
    assert response["reasoning"] == {"effort": "low", "summary": "detailed"}
    assert [prompt_of(submit).partition("<s>")[0] for submit in worker.submits] == [
        "lowTrue",
        "noneFalse",
        "highTrue",
    ]


BAD = call('{"place": ')


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([BAD], "input[0].arguments"),
        ([says("a", "user"), call(), result(), BAD], "input[3].arguments"),
        ([says("a", "user"), reasoning("b"), says("c"), call(), BAD, result()], "input[4].arguments"),
        ([says("a", "user"), says("b", "user"), call("[]"), result()], "input[2].arguments"),
        ([{"role": "assistant", "content": [{"type": "output_text", "text": "b"}] * 3}, BAD], "input[1].arguments"),
    ],
)
async def test_arguments_that_are_no_object_are_refused_by_the_clients_own_name(items: list[Json], field: str) -> None:
    worker = hermes()
    async with client(worker, store=new_store()) as responses:
        first = await answered(worker, responses.response(input="one"), "two")
        for before in ({}, {"instructions": "be kind"}, {"previous_response_id": first["id"], "instructions": "x"}):
            error = await responses.refusal(input=items, **before)
            assert (error["param"], error["message"]) == (field, f"{field}: must be a JSON object")
    assert len(worker.submits) == 1


async def test_a_stored_response_is_continued_with_the_results_of_its_calls() -> None:
    worker = hermes()
    async with client(worker, store=new_store()) as responses:
        asking = responses.response(input="Rain?", tools=[WEATHER], instructions="be kind")
        first = await answered(worker, asking, f"<think>\nHm.\n</think>\n\nI ask.\n{CALL}")
        [thought, said, called] = first["output"]
        assert (await responses.get(first["id"])).json() == first
        results = [result("rain", called["call_id"])]
        await answered(worker, responses.response(input=results, previous_response_id=first["id"]), "Yes.")
        # A client that keeps the conversation itself sends the items as they were answered.
        items = [says("Rain?", "user"), thought, said, called, *results]
        await answered(worker, responses.response(input=items, store=False), "Yes.")
    name = called["call_id"]
    turns = f'<s>assistant:(Hm.)I ask.[{name} weather {{"place": "Graz"}}]</s><s>tool:rain{name}</s>'
    assert prompt_of(worker.submits[1]) == prompt_of(worker.submits[2]) == f"<s>user:Rain?</s>{turns}{END}"


async def test_references_stand_for_the_items_of_stored_responses() -> None:
    worker = hermes()
    async with client(worker, store=new_store(), access=Access(identify=Keys().identify)) as responses:
        asking = responses.response(input="Rain?", tools=[WEATHER], key="acme")
        first = await answered(worker, asking, f"<think>Hm.</think>I ask.{CALL}")
        references: list[Json] = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        del references[0]["type"]
        results = [result("rain", first["output"][-1]["call_id"])]
        items = [says("Rain?", "user"), *references, *results]
        await answered(worker, responses.response(input=items, key="acme"), "Yes.")
        continued = responses.response(input=results, previous_response_id=first["id"], key="acme")
        await answered(worker, continued, "Yes.")
        for key, wrong in (("globex", items), ("acme", [*items, {**references[0], "id": references[0]["id"] + "0"}])):
            refused = error_of(await responses.post(input=wrong, headers=bearer(key)), 400)
            assert refused["param"] == ("input[1].id" if key == "globex" else "input[5].id")
    assert prompt_of(worker.submits[1]) == prompt_of(worker.submits[2])
    assert len(worker.submits) == 3


async def test_references_stand_for_no_more_than_a_conversation_may_have() -> None:
    worker = hermes()
    async with client(worker, store=new_store(max_bytes=4 << 20)) as responses:
        first = await answered(worker, responses.response(input="Rain?"), "rain " * 40_000)
        references = [{"type": "item_reference", "id": first["output"][0]["id"]}] * 22
        refused = error_of(await responses.post(input=references), 400)
    assert (refused["param"], "bytes of stored items" in refused["message"]) == ("input", True)


async def test_a_call_that_was_cut_off_is_left_out_with_its_result() -> None:
    """A client sends both back: agents answer a call that they cannot parse with an error."""
    worker = hermes()
    async with client(worker, store=new_store()) as responses:
        for text, turns in (
            (
                f"I ask.\n{CALL}\n{CALL[:-30]}",
                '<s>assistant:I ask.[NAME weather {"place": "Graz"}]</s><s>tool:rainNAME</s>',
            ),
            (CALL[:-30], ""),
        ):
            first = await answered(worker, responses.response(input="Rain?", tools=[WEATHER]), text)
            calls = [item for item in first["output"] if item["type"] == "function_call"]
            assert calls[-1]["status"] == "incomplete"
            results = [result("rain", called["call_id"]) for called in calls]
            prompt = f"<s>user:Rain?</s>{turns.replace('NAME', calls[0]['call_id'])}<s>user:So?</s>{END}"
            kept = [says("Rain?", "user"), *first["output"], *results, says("So?", "user")]
            references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
            for body in (
                {"input": kept},
                {"input": [says("Rain?", "user"), *references, *results, says("So?", "user")]},
                {"input": [*results, says("So?", "user")], "previous_response_id": first["id"]},
            ):
                await answered(worker, responses.response(**body), "Yes.")
                assert prompt_of(worker.submits[-1]) == prompt
            error = await responses.refusal(input=[*kept, BAD])
            assert error["param"] == f"input[{len(kept)}].arguments"


async def test_a_later_call_of_the_same_id_is_kept() -> None:
    worker = hermes()
    async with client(worker) as responses:
        items = [call("{", status="incomplete"), result("bad"), call("{}"), result("good")]
        await answered(worker, responses.response(input=items), "Yes.")
    assert prompt_of(worker.submits[0]) == f"<s>assistant:[c1 weather {{}}]</s><s>tool:goodc1</s>{END}"


async def test_references_to_many_long_responses_leave_the_loop_to_others() -> None:
    store = new_store(max_bytes=1 << 30)
    message = {"type": "message", "role": "assistant", "content": ""}
    body = json.dumps({"output": [message | {"id": f"msg_NAME{index:04x}"} for index in range(9000)]})
    names = [f"{number:048x}" for number in range(60)]
    for name in names:
        assert store.put("", f"resp_{name}", StoredResponse(body.replace("NAME", name).encode(), ()))
    references = [{"type": "item_reference", "id": f"msg_{name}0007"} for name in names]
    worker = hermes()
    async with client(worker, store=store) as responses, watched_loop() as work:
        await answered(worker, responses.response(input=references), "Yes.")
    assert work.longest_s < 0.1
