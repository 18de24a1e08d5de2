"""The figures of `make bench-regroup` are those of the worst case, and have the bars of their size."""

from benchmarks.regroup import GROW, SHRINK, Case, Measured, figures, is_met


def measured(shrink: float, grow: float, bare: float, torchrun: float | None = None) -> Measured:
    restarts = {change: [] if torchrun is None else [torchrun] for change in (SHRINK, GROW)}
    return Measured(
        ours={SHRINK: [shrink], GROW: [grow]}, bare={SHRINK: [0.01], GROW: [bare]}, moved={}, torchrun=restarts
    )


def test_each_figure_is_of_the_worst_case() -> None:
    found = figures(
        {
            Case("10mb", 2): measured(0.07, 0.1, 0.05),
            Case("100mb", 2): measured(0.04, 0.2, 0.1, torchrun=8.0),
            Case("1gb", 2): measured(0.05, 0.5, 1.0, torchrun=15.0),
            Case("1gb", 8): measured(0.06, 0.4, 0.5),
        }
    )

    assert found == {
        "pause_over_step_100mb": 0.8,
        "pause_over_step_1gb": 0.25,
        "pause_over_bare_p2p_1gb": 0.8,
        "shrink_seconds_2": 0.07,
        "shrink_seconds_8": 0.06,
        "ratio_100mb": 40.0,
        "ratio_1gb": 30.0,
    }
    met = [name for name, value in found.items() if is_met(name, value)]
    assert met == ["pause_over_step_100mb", "pause_over_step_1gb", "shrink_seconds_8", "ratio_100mb"]


def test_a_figure_without_a_case_is_left_out() -> None:
    assert set(figures({Case("10mb", 4): measured(0.1, 0.1, 0.1)})) == set()
