"""Asks a server for vectors and ranks through litellm, and prints what came as one JSON object.

Arguments: the server's address and the name of a model.
"""

import json
import sys
from typing import Any

import litellm

DOCUMENTS = ["a short one", "the longest of all documents here", "of middling length"]


def ranks(answer: Any) -> list[int]:
    return [result["index"] for result in answer.results]


def main(root: str, model: str) -> None:
    where: dict[str, Any] = {"api_base": f"{root}/v1", "api_key": "any"}
    inputs = ["hi", "there"]
    ways = {
        name: litellm.embedding(model=f"{name}/{model}", input=inputs, **where) for name in ("openai", "hosted_vllm")
    }
    reranking: dict[str, Any] = {"query": "why", "documents": DOCUMENTS, "api_key": "any"}
    vllm = litellm.rerank(model=f"hosted_vllm/{model}", api_base=root, top_n=2, **reranking)
    cohere = litellm.rerank(model=f"cohere/{model}", api_base=f"{root}/v2/rerank", **reranking)
    jina = litellm.rerank(model=f"jina_ai/{model}", api_base=f"{root}/v1/rerank", **reranking)
    came = {name: [each["embedding"] for each in answer.data] for name, answer in ways.items()}
    print(json.dumps({**came, "vllm_ranks": ranks(vllm), "cohere_ranks": ranks(cohere), "jina_ranks": ranks(jina)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
