"""Lets openai-agents answer a question with a tool of an MCP server, over chat and responses, and prints what came as
one JSON object.

Arguments: the server's address, the name of a model, and the question.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStdio
from agents.result import RunResultBase
from openai import AsyncOpenAI

MCP_SERVER = Path(__file__).with_name("weather_mcp.py")


def shown(result: RunResultBase) -> list[Any]:
    return [[item.type for item in result.new_items], result.final_output]


async def main(root: str, model: str, question: str) -> None:
    set_tracing_disabled(True)  # it would send traces to OpenAI
    parameters: Any = {"command": sys.executable, "args": [str(MCP_SERVER)]}
    came = {}
    async with AsyncOpenAI(base_url=f"{root}/v1", api_key="any", max_retries=0) as client:
        models = {
            "chat": OpenAIChatCompletionsModel(model, client),
            "responses": OpenAIResponsesModel(model, client),
        }
        async with MCPServerStdio(parameters, client_session_timeout_seconds=60) as server:
            for name, used in models.items():
                agent = Agent("weather", instructions="Be brief.", model=used, mcp_servers=[server])
                whole = await Runner.run(agent, question)
                streamed = Runner.run_streamed(agent, question)
                events = [event.name async for event in streamed.stream_events() if hasattr(event, "name")]
                came[name] = {"whole": shown(whole), "streamed": shown(streamed), "events": events}
    print(json.dumps(came))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
