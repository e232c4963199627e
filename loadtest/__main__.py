"""`python -m loadtest`: the load tester without the rest of Manta."""

from loadtest.cli import main

if __name__ == "__main__":
    main()
