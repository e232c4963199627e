"""The APIs of other servers: each dialect checks its request fields and writes answers in its
format."""
