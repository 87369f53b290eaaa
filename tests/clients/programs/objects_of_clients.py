"""Asks for objects through pydantic-ai, litellm and instructor, and prints what came as one JSON object.

Arguments: the server's address, the name of a model, and the question.
"""

import asyncio
import json
import sys
from typing import Any, Literal

import instructor
import litellm
from openai import OpenAI
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Closed(BaseModel):
    """Has no other properties, of which a model without sense could write any number."""

    model_config = ConfigDict(extra="forbid")


class Friend(Closed):
    kind: Literal["owl", "pig"]
    is_brave: bool


class Story(Closed):
    hero: Literal["fox", "pig", "owl"]
    age: Literal[1, 2, 3]
    friend: Friend | None


async def of_pydantic_ai(url: str, model: str, question: str) -> dict[str, Any]:
    provider = OpenAIProvider(base_url=url, api_key="any")
    came = {}
    for name, kind in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
        agent = Agent(kind(model, provider=provider), output_type=NativeOutput(Story))
        came[f"pydantic-ai {name} whole"] = (await agent.run(question)).output
        async with agent.run_stream(question) as streamed:
            came[f"pydantic-ai {name} streamed"] = await streamed.get_output()
    return came


def of_litellm(url: str, model: str, question: str) -> dict[str, Any]:
    came = {}
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(
            f"{provider}/{model}",
            [{"role": "user", "content": question}],
            response_format=Story,
            api_base=url,
            api_key="any",
            num_retries=0,
        )
        came[f"litellm {provider}"] = Story.model_validate_json(answer.choices[0].message.content)
    return came


def of_instructor(url: str, model: str, question: str) -> dict[str, Any]:
    made = OpenAI(base_url=url, api_key="any", max_retries=0)
    completions = instructor.from_openai(made, mode=instructor.Mode.JSON_SCHEMA).chat.completions
    asked: Any = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "response_model": Story,
        "max_retries": 1,
    }
    *_, last = completions.create_partial(**asked)
    return {"instructor whole": completions.create(**asked), "instructor streamed": last}


def main(root: str, model: str, question: str) -> None:
    asked = (f"{root}/v1", model, question)
    came = asyncio.run(of_pydantic_ai(*asked)) | of_litellm(*asked) | of_instructor(*asked)
    print(json.dumps({name: one.model_dump() for name, one in came.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
