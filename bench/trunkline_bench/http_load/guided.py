"""Output tokens per second of a server over HTTP: chats that ask for a JSON schema, and the same chats without one.

usage: python -m trunkline_bench.http_load.guided URL [--at-once 16] [--requests 64] [--turns 3]

URL is any OpenAI-compatible server, such as http://127.0.0.1:8000/v1. Plain and guided runs take turns; a JSON line is
printed for each. Documents that ended by themselves are checked with jsonschema_rs.
"""

import argparse
import asyncio
import json
import time

import jsonschema_rs
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "category": {"enum": ["animal", "plant", "mineral", "machine"]},
        "description": {"type": "string", "maxLength": 200},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 100}, "maxItems": 8},
        "size": {
            "type": "object",
            "properties": {"width_in_metres": {"type": "number"}, "height_in_metres": {"type": "number"}},
            "required": ["width_in_metres", "height_in_metres"],
            "additionalProperties": False,
        },
        "is_dangerous": {"type": "boolean"},
    },
    "required": ["name", "category", "description", "scores", "size", "is_dangerous"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
}
THINGS = ("a dog", "a diesel engine", "quartz", "an oak tree", "a jellyfish", "a bicycle", "a cactus", "gold")
MAX_TOKENS = 256


async def rate(client: AsyncOpenAI, model: str, *, guided: bool, requests: int, at_once: int) -> dict[str, object]:
    """Sends all requests, `at_once` of them at a time. Returns a row."""
    room = asyncio.Semaphore(at_once)

    async def ask(number: int) -> ChatCompletion:
        thing = THINGS[number % len(THINGS)]
        async with room:
            return await client.chat.completions.create(
                model=model, max_tokens=MAX_TOKENS, temperature=0.8, seed=number,
                messages=[{"role": "user", "content": f"Describe {thing} as a JSON object. Number {number}."}],
                extra_body={"response_format": FORMAT} if guided else None,
            )  # fmt: skip

    started_s = time.perf_counter()
    answers = await asyncio.gather(*map(ask, range(requests)))
    seconds = time.perf_counter() - started_s
    tokens = sum(answer.usage.completion_tokens for answer in answers if answer.usage)
    whole = [answer.choices[0] for answer in answers if answer.choices[0].finish_reason == "stop"]
    row: dict[str, object] = {
        "guided": guided, "at_once": at_once, "tok_per_s": tokens / seconds, "seconds": seconds, "tokens": tokens,
        "ended": len(whole),
    }  # fmt: skip
    if guided:
        row["valid"] = sum(_is_valid(choice.message.content or "") for choice in whole)
    return row


def _is_valid(text: str) -> bool:
    try:
        return jsonschema_rs.is_valid(SCHEMA, json.loads(text))
    except ValueError:
        return False


async def measure(url: str, *, requests: int, at_once: int, turns: int) -> None:
    """Prints a JSON line per run, after one run of each kind that is not shown."""
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=600.0, max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        for turn in range(-1, turns):
            for guided in (False, True):
                row = await rate(client, model, guided=guided, requests=requests, at_once=at_once)
                if turn >= 0:
                    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.url, requests=arguments.requests, at_once=arguments.at_once, turns=arguments.turns))


if __name__ == "__main__":
    main()
