"""Routes that serve no text of a model: models, adapters, batches, and what became of a request."""
