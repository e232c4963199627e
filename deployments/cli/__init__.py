"""The command line. Importing it makes sure that the packages imported later are Manta's own."""

from deployments.packages import prefer_own

prefer_own()  # before any of these packages is imported
