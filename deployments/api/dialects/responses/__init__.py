"""/v1/responses: chats with answers as items, which may be stored or generated in the
background."""
