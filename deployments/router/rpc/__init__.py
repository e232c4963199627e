"""The gRPC server: the HTTP API with protobuf messages, on the port that the configuration sets."""
