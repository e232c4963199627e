"""What a router knows, as it is now, for a person who looks: GET /v1/live."""
