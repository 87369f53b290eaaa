"""Lets litellm answer a question with a tool, and prints the answers as one JSON object.

Arguments: the server's address, the name of a model, and the question.
"""

import json
import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def get_weather(city: str) -> str:
    return f"{city}: 18 degrees and clear"


def answer_to(question: str, model: str, *, stream: bool, where: dict[str, Any]) -> Any:
    """Calls what the model asks for, until it answers in text."""
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        answer = litellm.completion(model, messages, tools=[TOOL], stream=stream, num_retries=0, **where)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def main(root: str, model: str, question: str) -> None:
    bases = {"openai": f"{root}/v1", "hosted_vllm": f"{root}/v1", "anthropic": root}
    came = {
        provider: [
            answer_to(question, f"{provider}/{model}", stream=stream, where={"api_base": base, "api_key": "any"})
            for stream in (False, True)
        ]
        for provider, base in bases.items()
    }
    print(json.dumps(came))


if __name__ == "__main__":
    main(*sys.argv[1:])
