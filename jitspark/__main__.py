"""`python -m jitspark`: the command line."""

from jitspark.cli import main

if __name__ == "__main__":
    main()
