"""The command line. The import of this package makes later imports find Manta's own packages."""

from deployments.packages import prefer_own

prefer_own()  # runs before any of Manta's packages is imported
