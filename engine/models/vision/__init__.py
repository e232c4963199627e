"""Towers: from 8-bit pixels to the embeddings of pictures. A file has what one family adds."""
