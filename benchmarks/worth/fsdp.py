"""FSDP2 on shaped links against our best static and our best elastic run, one after the other.

Only root can shape links.
"""

import sys

from tests.testkit.results import print_table, write_result

from .runs import FULL, take_precedence
from .whole import fsdp, links, product
from .whole.way import OFFLOAD, STATIC


def main() -> int:
    """Measure, print and write the result."""
    if why := links.missing():
        print(f"FSDP2 is not measured: {why}", file=sys.stderr)
        return 1
    take_precedence()
    case = next(iter(FULL))
    ours = [product.run(case, way).seconds for way in (STATIC, OFFLOAD)]
    found = fsdp.figures(case, *ours)
    for name in fsdp.RUNS:
        columns = ("seconds_by_gbps", "seconds_at_best_by_gbps")
        rows = [[rate, *(found[name][column][rate] for column in columns)] for rate in found[name][columns[0]]]
        print_table(f"{name}: ours {found[name]['our_seconds']:.1f} s", ["Gb/s", "seconds", "at best"], rows)
    write_result("worth-fsdp", {"runs": {"fsdp": found}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
