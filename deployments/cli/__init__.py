"""The command line. Importing this package makes sure that later imports find Manta's own
packages."""

from deployments.packages import prefer_own

prefer_own()  # runs before any of Manta's packages is imported
