"""Encoder pools: actors that make embeddings of images, and the replicas that ask for them."""
