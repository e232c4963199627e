"""The answer to a generation request: whole or as a stream, which goes on after it was cut."""
