"""The routes that answer with what a pooling model makes of texts: vectors, scores and labels."""
