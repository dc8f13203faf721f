"""``python -m aionn``."""

from aionn.cli.main import main

if __name__ == "__main__":
    main()
