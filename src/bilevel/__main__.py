"""`python -m bilevel` and the command `bilevel`."""

import sys

from bilevel import extras


def main() -> None:
    """The entry point."""
    try:
        extras.require("typer", "rich", extra="all", purpose="The command bilevel")
    except extras.MissingPackage as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    from bilevel import cli

    cli.main()


if __name__ == "__main__":
    main()
