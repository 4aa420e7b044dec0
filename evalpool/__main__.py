"""The command `evalpool`, and `python -m evalpool`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it with exit code 130, also while its modules are still being imported."""
    try:
        from evalpool.api.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
