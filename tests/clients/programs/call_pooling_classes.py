"""Asks a server for vectors and ranks through cohere's SDK and the classes of langchain and llama-index.

It prints what came as one JSON object.

Arguments: the server's address and the name of a model.
"""

import json
import sys
from typing import Any

import cohere
from langchain_cohere import CohereRerank
from langchain_community.document_compressors import JinaRerank, jina_rerank
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank as CohereRerankOfNodes
from llama_index.postprocessor.jinaai_rerank import JinaRerank as JinaRerankOfNodes

INPUTS = ["hi", "there"]
QUERY = "why"
DOCUMENTS = ["a short one", "the longest of all documents here", "of middling length"]
KEY = "any"


def of_cohere(root: str, model: str) -> dict[str, list[int]]:
    asked: dict[str, Any] = {"model": model, "query": QUERY, "documents": DOCUMENTS}
    first, second = (kind(KEY, base_url=root) for kind in (cohere.Client, cohere.ClientV2))
    answers = {
        "cohere_v1": first.rerank(**asked, return_documents=True),
        "cohere_v2": second.rerank(**asked),
        "cohere_v2_top": second.rerank(**asked, top_n=2),
    }
    assert all(each.document.text == DOCUMENTS[each.index] for each in answers["cohere_v1"].results)
    return {name: [result.index for result in answer.results] for name, answer in answers.items()}


def of_langchain(root: str, model: str) -> dict[str, list[int]]:
    jina_rerank.JINA_API_URL = f"{root}/v1/rerank"  # the class has no setting for it
    documents = [Document(text, metadata={"index": index}) for index, text in enumerate(DOCUMENTS)]
    classes: dict[str, Any] = {
        "langchain_cohere": CohereRerank(model=model, base_url=root, cohere_api_key=KEY, top_n=2),
        "langchain_jina": JinaRerank(model=model, jina_api_key=KEY, top_n=2),
    }
    return {
        name: [document.metadata["index"] for document in each.compress_documents(documents, QUERY)]
        for name, each in classes.items()
    }


def of_llama_index(root: str, model: str) -> dict[str, list[Any]]:
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(index))) for index, text in enumerate(DOCUMENTS)]
    classes: dict[str, Any] = {
        "llama_index_cohere": CohereRerankOfNodes(model=model, base_url=root, api_key=KEY, top_n=2),
        "llama_index_jina": JinaRerankOfNodes(model=model, base_url=f"{root}/v1", api_key=KEY, top_n=2),
    }
    ranks: dict[str, list[Any]] = {
        name: [int(node.node.node_id) for node in each.postprocess_nodes(nodes, QueryBundle(QUERY))]
        for name, each in classes.items()
    }
    where: dict[str, Any] = {"model_name": model, "api_base": f"{root}/v1", "api_key": KEY, "max_retries": 0}
    for name, kind in {"openai": OpenAIEmbedding, "openai_like": OpenAILikeEmbedding}.items():
        embedding = kind(**where)
        ranks[f"llama_index_{name}"] = embedding.get_text_embedding_batch(INPUTS)
        ranks[f"llama_index_{name}_query"] = [embedding.get_query_embedding(text) for text in INPUTS]
    return ranks


def main(root: str, model: str) -> None:
    print(json.dumps({**of_cohere(root, model), **of_langchain(root, model), **of_llama_index(root, model)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
