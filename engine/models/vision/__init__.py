"""Vision towers, which compute embeddings of pictures from 8-bit pixels; one family a module."""
