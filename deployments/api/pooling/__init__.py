"""The routes of pooling models, which answer with vectors, scores and labels of texts."""
