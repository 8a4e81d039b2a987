"""`python -m megajax COMMAND`."""

from megajax.cli import entry

if __name__ == "__main__":
    entry()
