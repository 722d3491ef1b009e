"""`python -m bitwitness` is the command `bitwitness`."""

from bitwitness.cli.entry import main

if __name__ == "__main__":
    main()
