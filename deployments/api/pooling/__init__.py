"""The routes of pooling models, which answer with embeddings, scores and labels of texts."""
