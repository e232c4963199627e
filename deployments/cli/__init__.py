from deployments.packages import prefer_own

prefer_own()  # before any other of them is imported
