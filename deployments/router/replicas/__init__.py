"""The connections to the replicas, as a router has them."""
