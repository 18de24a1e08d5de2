"""See `tests.soak.run`. Trainers are forked from a server that imports this module: it imports nothing itself."""

import sys

if __name__ == "__main__":
    from tests.soak.run import main

    sys.exit(main())
