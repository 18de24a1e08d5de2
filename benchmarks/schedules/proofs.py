"""What is proven of the planner of slices, beside the measurements."""

from tests.testkit.trainer.slice_cases import planner_worst

from .part import Found


def run(pairs: int) -> Found:
    """Compare planned slices with all slicings. It measures nothing.

    Args:
        pairs: of blocks, which the other parts run.
    """
    by_paper, by_lists = planner_worst()
    return Found({"planner_worst": by_paper, "planner_worst_exact": by_lists})
