"""Embeddings and rerankings: router and worker against sentence-transformers."""
