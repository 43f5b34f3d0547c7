"""``python -m graphplat``: the command line."""

from graphplat.cli.main import main

if __name__ == "__main__":
    main()
