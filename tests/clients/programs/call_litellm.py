"""Calls a server through litellm in each way that it knows, and prints what came as one JSON object.

Arguments: the server's address and the name of a model.
"""

import asyncio
import json
import sys
from typing import Any

import litellm

LIMITS: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "num_retries": 0}
QUESTION = [{"role": "user", "content": "Tell me a story about a fox."}]


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def streamed_asynchronously(model: str, where: dict[str, str]) -> str:
    stream = await litellm.acompletion(model=model, messages=QUESTION, stream=True, **LIMITS, **where)
    return text_of([chunk async for chunk in stream])


async def by_anthropic(model: str, root: str) -> str:
    answer = await litellm.anthropic_messages(
        model=f"anthropic/{model}", messages=QUESTION, api_base=root, api_key="any", max_tokens=24, temperature=0
    )
    return str(answer["content"][0]["text"])


def error_of(model: str, messages: Any, where: dict[str, str], **options: Any) -> str:
    try:
        litellm.completion(model=model, messages=messages, num_retries=0, **options, **where)
    except Exception as error:  # the name of its class is what the test reads
        return type(error).__name__
    return ""


def main(root: str, model: str) -> None:
    where = {"api_base": f"{root}/v1", "api_key": "any"}
    chat = litellm.completion(model=f"openai/{model}", messages=QUESTION, **LIMITS, **where)
    with_usage = list(
        litellm.completion(
            model=f"openai/{model}",
            messages=QUESTION,
            stream=True,
            stream_options={"include_usage": True},
            **LIMITS,
            **where,
        )
    )
    vllm = litellm.completion(model=f"hosted_vllm/{model}", messages=QUESTION, top_k=1, **LIMITS, **where)
    complete = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="Once upon a time", **LIMITS, **where
    )
    response = litellm.responses(
        model=f"openai/{model}", input="Tell me a story about a fox.", max_output_tokens=24, temperature=0, **where
    )
    long = [{"role": "user", "content": "fox " * 5000}]
    print(
        json.dumps(
            {
                "chat": chat.choices[0].message.content,
                "finish_reason": chat.choices[0].finish_reason,
                "completion_tokens": chat.usage.completion_tokens,
                "streamed": text_of(with_usage),
                "streamed_usage": [
                    chunk.usage.completion_tokens for chunk in with_usage if getattr(chunk, "usage", None)
                ],
                "streamed_asynchronously": asyncio.run(streamed_asynchronously(f"openai/{model}", where)),
                "vllm": vllm.choices[0].message.content,
                "completion": complete.choices[0].text,
                "responses": response.output[0].content[0].text,
                "anthropic": asyncio.run(by_anthropic(model, root)),
                "unknown_model": error_of("openai/no-such-model", QUESTION, where),
                "bad_field": error_of(f"openai/{model}", QUESTION, where, temperature=-1),
                "too_long": error_of(f"openai/{model}", long, where),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
