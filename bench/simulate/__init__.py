"""A fleet in events, driving the real routing and scaling functions: docs/routing.md."""
