"""/v1/messages: chats with answers as content blocks, for Anthropic's clients."""
