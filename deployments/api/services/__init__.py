"""Routes that generate nothing: models, adapters, batches, and the server with its requests."""
