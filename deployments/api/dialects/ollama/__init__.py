"""Ollama's API (/api/chat, /api/tags and others), for clients that know no other API."""
