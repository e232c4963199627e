"""Encoder pools: actors that compute image embeddings, and the code by which replicas call them."""
