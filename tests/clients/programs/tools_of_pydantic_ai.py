"""Lets pydantic-ai answer a question with a tool, over chat and responses, and prints what came as one JSON object.

Arguments: the server's address, the name of a model, and the question.
"""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.messages import ThinkingPart, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: 18 degrees and clear"


def thought_of(part: ThinkingPart) -> str:
    """A thought in full: of a response, its content is the summary, which open models do not write."""
    return part.content or "".join((part.provider_details or {}).get("raw_content", ()))


async def main(root: str, model: str, question: str) -> None:
    provider = OpenAIProvider(base_url=f"{root}/v1", api_key="any")
    came = {}
    for name, kind in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
        agent = Agent(kind(model, provider=provider), tools=[get_weather])
        whole = await agent.run(question)
        parts = [part for message in whole.all_messages() for part in message.parts]
        async with agent.run_stream(question) as streamed:
            pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
        came[name] = {
            "whole": whole.output,
            "streamed": "".join(pieces),
            "thoughts": [thought_of(part) for part in parts if isinstance(part, ThinkingPart)],
            "calls": [[part.tool_name, part.args_as_dict()] for part in parts if isinstance(part, ToolCallPart)],
        }
    print(json.dumps(came))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
