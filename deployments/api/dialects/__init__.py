"""The APIs of other servers: each checks its own fields and writes answers in its own form."""
