"""POST /v1/completions, /tokenize, /detokenize and GET /v1/models."""

import asyncio
from typing import Any

from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import client
from tests.router.tokenizer_files import BOS, byte_tokenizer
from trunkline_router.edge.openai.completions import AT_ONCE
from trunkline_router.workers.link_context import LinkLimits

PATH = "/v1/completions"
TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


async def test_a_text_is_continued() -> None:
    async with client(FakeWorker("w", answer=3)) as asks:
        answer = await asks.complete("hi")
    assert (answer["object"], answer["id"][:5]) == ("text_completion", "cmpl-")
    [choice] = answer["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"], choice["logprobs"]) == (0, "xxx", "length", None)
    assert answer["usage"]["prompt_tokens"] == 3, "with BOS"


async def test_several_prompts_make_one_list_of_choices_in_their_order() -> None:
    async with client(FakeWorker("w", answer=2)) as asks:
        for prompts in (["a", "bc", "def"], [ids("a"), ids("bc"), ids("def")]):
            answer = await asks.complete(prompts, n=2)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
            with_bos = 3 if isinstance(prompts[0], str) else 0
            assert answer["usage"]["prompt_tokens"] == 6 + with_bos
            assert answer["usage"]["completion_tokens"] == 12


async def test_more_prompts_than_run_at_once_are_all_answered() -> None:
    async with client(FakeWorker("w", answer=1)) as asks:
        answer = await asks.complete([f"{number}" for number in range(2 * AT_ONCE + 1)])
        assert len(answer["choices"]) == 2 * AT_ONCE + 1


async def test_streams_of_several_prompts_interleave_under_their_numbers() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker) as asks:
        asked = asyncio.create_task(asks.all_events(PATH, prompt=["a", "b"], stream_options={"include_usage": True}))
        first, second = await worker.arrived.get(), await worker.arrived.get()
        by_prompt = {tuple(choice.submit.prompt_token_ids)[1:]: choice for choice in (first, second)}
        by_prompt[tuple(ids("b"))].tokens(1, text="B", finish=True)
        by_prompt[tuple(ids("a"))].tokens(1, text="A", finish=True)
        *events, usage, done = await asked
    assert {event["choices"][0]["index"]: event["choices"][0]["text"] for event in events} == {0: "A", 1: "B"}
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"], done) == (4, 2, "[DONE]")


async def test_an_error_of_one_prompt_ends_them_all() -> None:
    worker = FakeWorker("w", answer=None)
    async with client(worker, link_limits=LinkLimits(inter_token_timeout_s=1000)) as asks:
        asked = asyncio.create_task(asks.refusal(PATH, prompt=[ids("a"), [1 << 20], ids("b")]))
        assert (await asked)["param"] == "prompt"
        await until(lambda: not asks.router.links[0].worker or not asks.router.connected(0).open_choices)


async def test_an_empty_prompt_begins_where_the_models_texts_begin() -> None:
    worker = FakeWorker("w", answer=1)
    async with client(worker) as asks:
        answer = await asks.complete("", echo=True, logprobs=0, return_token_ids=True)
    [choice] = answer["choices"]
    assert list(worker.submits[0].prompt_token_ids) == choice["prompt_token_ids"] == [BOS]
    assert (answer["usage"]["prompt_tokens"], choice["text"]) == (1, "x")
    assert choice["logprobs"]["tokens"][0] == "<s>"


async def test_echo_repeats_the_prompt_and_its_log_probabilities() -> None:
    async with client(FakeWorker("w", answer=2)) as asks:
        plain = await asks.complete("hi", echo=True)
        scored = await asks.complete("hi", echo=True, logprobs=1)
        of_ids = await asks.complete(ids("hi"), echo=True, logprobs=0)
        only = await asks.complete("hi", echo=True, logprobs=1, max_tokens=0)
    assert plain["choices"][0]["text"] == "hixx"
    columns = scored["choices"][0]["logprobs"]
    assert columns["tokens"] == ["<s>", "h", "i", "<unk>", "<s>"]
    assert columns["text_offset"] == [0, 0, 1, 2, 2], "special tokens are not in the text"
    assert columns["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert columns["top_logprobs"][:2] == [None, {"h": -0.5}]
    assert of_ids["choices"][0]["logprobs"]["tokens"] == ["h", "i", "<unk>", "<s>"]
    assert of_ids["choices"][0]["text"] == "hixx"
    [choice] = only["choices"]
    assert (choice["text"], choice["finish_reason"], only["usage"]["completion_tokens"]) == ("hi", "length", 0)
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i"]


async def test_a_streamed_echo_is_the_same() -> None:
    async with client(FakeWorker("w", answer=2)) as asks:
        whole = await asks.complete("hi", echo=True, logprobs=1)
        *events, done = await asks.all_events(PATH, prompt="hi", echo=True, logprobs=1)
    text = "".join(event["choices"][0]["text"] for event in events)
    assert (text, done) == (whole["choices"][0]["text"], "[DONE]")
    for name, column in whole["choices"][0]["logprobs"].items():
        parts = [event["choices"][0]["logprobs"][name] for event in events if event["choices"][0]["logprobs"]]
        assert [value for part in parts for value in part] == column, name


async def test_token_ids_are_told_where_they_are_asked_for() -> None:
    async with client(FakeWorker("w", answer=2)) as asks:
        [choice] = (await asks.complete("hi", return_token_ids=True))["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == ([BOS, *ids("hi")], [0, 1])
        [choice] = (await asks.complete("hi", return_token_ids=True, add_special_tokens=False))["choices"]
        assert choice["prompt_token_ids"] == ids("hi")


async def test_prompt_log_probabilities_are_by_token_id() -> None:
    async with client(FakeWorker("w", answer=1)) as asks:
        [choice] = (await asks.complete("h", prompt_logprobs=0))["choices"]
    [token_id] = ids("h")
    expected = {str(token_id): {"logprob": -0.5, "rank": 1, "decoded_token": "h"}}
    assert choice["prompt_logprobs"] == [None, expected]


async def test_the_default_of_sixteen_tokens_fits_into_the_context_and_an_explicit_limit_must() -> None:
    worker = FakeWorker("w", answer=None, context_length=20)
    async with client(worker) as asks:
        asked = asyncio.create_task(asks.complete("x" * 9))
        choice = await worker.arrived.get()
        assert choice.submit.sampling.max_tokens == 10
        choice.tokens(1, finish=True)
        await asked
        error = await asks.refusal(PATH, prompt="x" * 9, max_tokens=16)
        assert error["code"] == "context_length_exceeded"
        assert "this model's maximum context length is" in error["message"], "clients look for these words"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"prompt": "a", "model": None}, "model"),
    "no prompt": ({}, "prompt"),
    "a prompt of numbers and texts": ({"prompt": [1, "a"]}, "prompt"),
    "an empty prompt without BOS": ({"prompt": "", "add_special_tokens": False}, "prompt"),
    "an empty list of tokens among others": ({"prompt": [[1], []]}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "a negative token": ({"prompt": [-1]}, "prompt"),
    "true as a token": ({"prompt": [True]}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 257}, "prompt"),
    "best_of": ({"prompt": "a", "best_of": 2}, "best_of"),
    "suffix": ({"prompt": "a", "suffix": "b"}, "suffix"),
    "no tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "too many logprobs": ({"prompt": "a", "logprobs": 21}, "logprobs"),
    "too many stop strings": ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    "a long stop string": ({"prompt": "a", "stop": "x" * 1025}, "stop"),
}


NO_OBJECTS = [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b'{"prompt": NaN}', b"\xff", b"[" * 100_000]


async def test_what_is_not_served_is_refused_by_name() -> None:
    async with client(FakeWorker("w")) as asks:
        for name, (body, param) in REFUSED.items():
            assert (await asks.refusal(PATH, **body))["param"] == param, name
        await asks.complete()


async def test_what_is_no_json_object_is_refused() -> None:
    async with client(FakeWorker("w")) as asks:
        for body in NO_OBJECTS:
            answer = await asks.post(PATH, body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), body[:9]
        text = await asks.post(PATH, b'{"prompt": "hi"}', content_type="text/plain")
        assert (text.status_code, text.json()["error"]["param"]) == (400, "content-type")
        await asks.complete()


async def test_an_unknown_model_is_not_found() -> None:
    async with client(FakeWorker("w")) as asks:
        error = await asks.refusal(PATH, 404, prompt="a", model="gpt-x")
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert (await asks.http.get("/v1/models/gpt-x")).status_code == 404


async def test_models_are_listed_and_found_by_name() -> None:
    async with client(FakeWorker("w", model="org/tiny")) as asks:
        listed = (await asks.http.get("/v1/models")).json()
        assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["org/tiny"])
        for name in ("org/tiny", "org%2Ftiny"):
            assert (await asks.http.get(f"/v1/models/{name}")).json() == listed["data"][0]


async def test_texts_and_conversations_become_tokens_and_back() -> None:
    async with client(FakeWorker("w")) as asks:
        told = await asks.answer("/tokenize", prompt="hi", return_token_strs=True)
        assert (told["tokens"], told["count"], told["token_strs"]) == ([BOS, *ids("hi")], 3, ["<s>", "h", "i"])
        assert told["max_model_len"] == 4096
        assert (await asks.answer("/tokenize", prompt="hi", add_special_tokens=False))["tokens"] == ids("hi")
        chat = await asks.answer("/tokenize", messages=[{"role": "user", "content": "a"}])
        text = await asks.answer("/detokenize", tokens=chat["tokens"])
        assert text["prompt"] == "user:aassistant:", "special tokens have no text"
        assert (await asks.refusal("/tokenize"))["param"] == "prompt"
        for token_id in (10**12, 100_000):
            assert (await asks.refusal("/detokenize", tokens=[token_id]))["param"] == "tokens"


async def test_the_longest_request_id_serves_several_prompts() -> None:
    async with client(FakeWorker("w")) as asks:
        answer = await asks.post(PATH, {"model": "tiny", "prompt": ["a", "b"]}, x_request_id="r" * 128)
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "r" * 128)


async def test_fields_that_are_not_served_may_have_their_defaults() -> None:
    async with client(FakeWorker("w")) as asks:
        await asks.complete(best_of=1, suffix="", length_penalty=1, use_beam_search=False)
        for body in ({"best_of": 2}, {"suffix": "x"}, {"length_penalty": 2}, {"best_of": True}):
            assert (await asks.refusal(PATH, prompt="a", **body))["param"] in body


async def test_status_paths_answer() -> None:
    worker = FakeWorker("w")
    async with client(worker) as asks:
        assert (await asks.http.get("/health")).status_code == 200
        assert (await asks.http.get("/ready")).status_code == 200
        assert "version" in (await asks.http.get("/version")).json()
        await worker.die()
        await until(lambda: asks.router.links[0].worker is None)
        assert (await asks.http.get("/ready")).status_code == 503
        assert (await asks.http.get("/health")).status_code == 200
