"""Encoder pools: actors that compute embeddings of images, and the code of replicas that ask."""
