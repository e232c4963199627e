"""A fleet of GPU and CPU replicas on one machine, under a day's load compressed to minutes."""
