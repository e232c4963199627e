"""Vision encoders (towers), which compute embeddings of pictures; each module has one family."""
