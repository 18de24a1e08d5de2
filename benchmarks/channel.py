"""What it costs the operator to tell the largest job of a generation: 4,096 long-polls over TLS, answered together.

The channel lives alone in one process, and the workers in others, so that only the operator's loop is measured. The
second case is the worst: no leader hands the members on, so all workers ask the operator for the whole list.
"""

import sys
from dataclasses import asdict, fields

from tests.testkit.operator.channel_load import Figures, measure
from tests.testkit.results import print_table, write_result

SIZES = (1500, 4096)


def main() -> int:
    """Measure all sizes and write the result."""
    cases = {str(size): measure(size) for size in SIZES}
    cases[f"{SIZES[-1]}_silent_leader"] = measure(SIZES[-1], whole=True)
    rows = [(case, *asdict(figures).values()) for case, figures in cases.items()]
    columns = [field.name for field in fields(Figures)]
    print_table("One generation told to all workers over TLS", ("workers", *columns), rows)
    write_result(
        "channel",
        {f"{name}_{case}": value for case, figures in cases.items() for name, value in asdict(figures).items()},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
