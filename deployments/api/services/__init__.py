"""Routes that generate nothing: for models, adapters, batches, the server's state and its
requests."""
