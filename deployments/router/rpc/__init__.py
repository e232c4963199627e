"""gRPC: the service of the HTTP API in protobuf messages, where the configuration has a port."""
