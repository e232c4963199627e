"""/v1/responses: a chat answered in items, which may be stored or generated in the background."""
