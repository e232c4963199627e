"""The Responses and Messages APIs: read into chats, answered as items and blocks."""
