"""`python -m wan_diloco` is the command line."""

from wan_diloco.cli.main import main

if __name__ == "__main__":
    main()
