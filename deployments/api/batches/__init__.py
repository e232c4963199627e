"""The Files and Batches APIs: requests from a file, answered into one when there is room."""
