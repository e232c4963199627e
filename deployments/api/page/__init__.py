"""The web page for chatting with the served models and inspecting the service: its files and
routes."""
