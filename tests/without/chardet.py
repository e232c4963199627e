"""The real chardet for all importers but requests, which then takes charset_normalizer."""

from left_out import refuse_or_load  # type: ignore[import-not-found]  # PYTHONPATH has this folder

refuse_or_load(__name__, "requests")
