"""A web page to chat with the served models and to inspect the service: its files and routes."""
