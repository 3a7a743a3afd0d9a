"""Retrieval-augmented generation with masked-diffusion language models over a persistent chunk-KV store."""
