"""Bodies that are made to cost much."""

import time

from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import client

MANY = b",".join([b"0.5"] * 290_000)


async def test_hundreds_of_thousands_of_wrong_elements_cost_no_more_than_one() -> None:
    bodies = {
        "/v1/completions": [b'{"model":"tiny","prompt":"a","stop_token_ids":[%b]}', b'{"model":"tiny","prompt":[%b]}'],
        "/v1/chat/completions": [
            b'{"model":"tiny","messages":[%b]}',
            b'{"model":"tiny","messages":[{"role":"user","content":[%b]}]}',
        ],
        "/v1/responses": [b'{"model":"tiny","input":[%b]}', b'{"model":"tiny","input":"a","include":[%b]}'],
        "/v1/messages": [b'{"max_tokens":1,"messages":[%b]}', b'{"max_tokens":1,"messages":[],"stop_sequences":[%b]}'],
        "/detokenize": [b'{"tokens":[%b]}'],
    }
    async with client(FakeWorker("w")) as asks:
        for path, templates in bodies.items():
            for template in templates:
                begun_s = time.process_time()
                answer = await asks.post(path, template % MANY)
                assert answer.status_code == 400, answer.text
                # Reading a body of 1 MB takes some hundredths of a second; an error for each element would take 4 s.
                assert time.process_time() - begun_s < 1.5, (path, template)
        await asks.complete()


async def test_a_number_beyond_the_largest_float_is_refused_by_its_field() -> None:
    numbers = {"temperature": b"1e999", "logit_bias": b'{"1":-1e999}', "top_p": b"1" * 400 + b".0"}
    async with client(FakeWorker("w")) as asks:
        for field, value in numbers.items():
            body = b'{"model":"tiny","prompt":"a","%b":%b}' % (field.encode(), value)
            answer = await asks.post("/v1/completions", body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["message"].startswith(f"{field}: input should be a finite number")


async def test_thousands_of_unknown_fields_are_refused_at_once() -> None:
    many = b",".join(b'"x%d":1' % number for number in range(5000))
    async with client(FakeWorker("w")) as asks:
        for body in (b'{"model":"tiny","prompt":"a",%b}', b'{"model":"tiny","prompt":"a","stream_options":{%b}}'):
            assert (await asks.post("/v1/completions", body % many)).status_code == 400


async def test_log_probabilities_of_a_long_prompt_are_bounded() -> None:
    async with client(FakeWorker("w", context_length=10_000, kv_token_capacity=10_000)) as asks:
        error = await asks.refusal("/v1/completions", prompt="x" * 7000, echo=True, logprobs=20)
        assert error["param"] == "logprobs"
        await asks.complete("x" * 100, echo=True, logprobs=20, max_tokens=1)
