"""The command line. Importing it makes sure that the packages below are Manta's own."""

from deployments.packages import prefer_own

prefer_own()  # before any other of them is imported
