"""The answer to a generation request: whole, or as a stream that a client can resume."""
