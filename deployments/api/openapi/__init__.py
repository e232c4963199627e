"""The description of the HTTP API for programs and people, from the tables of routes and fields."""
