"""Routes that generate nothing: models, adapters, batches, and the fate of requests."""
