"""The command line. Importing it makes sure that the packages imported later are Manta's own."""

from deployments.packages import prefer_own

prefer_own()  # runs before any of Manta's packages is imported
