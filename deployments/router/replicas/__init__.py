"""A router's connections to the replicas of its model."""
