"""Vectors and scores over HTTP: OpenAI's embeddings, the rerankers of Jina and Cohere, and vLLM's endpoints."""
