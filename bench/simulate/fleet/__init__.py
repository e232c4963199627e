"""The simulated fleet: replicas, their engines, what they are asked, and time."""
