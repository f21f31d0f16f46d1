"""`python -m fgai`: the command line where the `fgai` script is not on the path."""

from fgai.cli import main

if __name__ == "__main__":
    main()
