"""Packages that most of a test's processes do without; `tests/stages.py` puts this folder first.

Test dependencies install pandas and chardet, which Manta does not use. Ray Serve imports pandas and
PyArrow in each of its processes where they are installed: half a second and 77 MiB.
"""
