"""/v1/messages: a chat answered in blocks, for Anthropic's clients."""
