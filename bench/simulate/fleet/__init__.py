"""The simulated fleet: replicas, their engines, workloads, and virtual time."""
