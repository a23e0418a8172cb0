"""`python -m dispatch` is the `dispatch` command."""

from dispatch.cli.main import main

if __name__ == "__main__":
    main()
