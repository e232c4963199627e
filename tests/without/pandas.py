"""The real pandas for all importers but Ray Serve, which would only encode data frames with it."""

from left_out import refuse_or_load  # type: ignore[import-not-found]  # PYTHONPATH has this folder

refuse_or_load(__name__, "ray.serve")
