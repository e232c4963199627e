"""gRPC: the HTTP API's service with protobuf messages, if the configuration has a port for it."""
