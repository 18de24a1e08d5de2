"""Which frozen layers are off the device, by the control state alone."""

from pipetransformer.partition import Cut
from pipetransformer.state.control import Control


def control_at(*boundaries: int) -> Control:
    control = Control()
    for boundary in boundaries:
        control.move_boundary(boundary)
    return control


def layers(control: Control) -> tuple[int, int]:
    return control.cached_layers, control.awaited_layers


def test_layers_that_freeze_before_earlier_ones_are_cached_wait_for_those() -> None:
    control = control_at(4, 7, 9)
    assert layers(control) == (0, 4)
    control.note_cached(4)
    assert layers(control) == (4, 9)
    control.note_cached(9)
    assert layers(control) == (9, 9)
    control.move_boundary(10)
    assert layers(control) == (9, 10)


def test_what_stays_frozen_below_a_boundary_that_falls_stays_off_the_device() -> None:
    control = control_at(7)
    control.note_cached(7)
    control.move_boundary(4)
    assert layers(control) == (4, 4)
    waiting = control_at(7, 4)
    assert layers(waiting) == (0, 4)
    assert layers(control_at(7, 0, 2)) == (0, 2)


def test_a_first_stage_that_holds_fewer_layers_caches_fewer() -> None:
    control, cut = control_at(7), Cut([range(4), range(4, 9), range(9, 14)], 8)
    control.note_cached(cut.prefix_layers(control.awaited_layers))
    assert layers(control) == (3, 7)
    assert [cut.off_device(stage, control.cached_layers) for stage in range(3)] == [[0, 1, 2, 3], [], []]
    wider = Cut([range(10), range(10, 14)], 8)
    assert wider.off_device(0, control.cached_layers) == [0, 1, 2, 3]
    control.note_cached(wider.prefix_layers(control.awaited_layers))
    assert layers(control) == (7, 7)


def test_copies_that_compute_ahead_are_off_the_device_too() -> None:
    cut = Cut([range(6), range(6, 10), range(10, 14)], 8, ahead_units=5, holders=(0, 1))
    assert [cut.off_device(stage, 3) for stage in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 3], []]
    assert [cut.off_device(stage, 0) for stage in range(3)] == [[], [], []]


def test_layers_on_trial_do_not_count_for_layouts() -> None:
    control = control_at(4)
    control.note_cached(4)
    control.move_boundary(6)
    control.note_cached(6)
    control.on_trial = 2
    assert (control.settled_boundary, control.settled_cached_layers) == (4, 4)


def test_a_checkpoint_knows_no_cache() -> None:
    control = control_at(4)
    control.note_cached(4)
    assert layers(Control.from_dict(control.to_dict())) == (4, 4)
    assert layers(Control.from_file(control.to_file())) == (0, 4)


def test_a_resume_waits_once_for_all_frozen_layers() -> None:
    """The checkpoint was written while four of nine layers were awaited, before the other five."""
    control = control_at(4, 9)
    assert layers(control) == (0, 4)
    assert layers(Control.from_file(control.to_file())) == (0, 9)


def test_workers_that_return_to_an_earlier_state_keep_layers_off_the_device() -> None:
    earlier = control_at(4, 9)
    earlier.return_with([Control(), Control(cached_layers=7), control_at(2)])
    assert layers(earlier) == (7, 9)
    earlier.return_with([Control(cached_layers=12)])
    assert layers(earlier) == (9, 9)
    unmoved = control_at(4, 9)
    unmoved.return_with([Control()])
    assert layers(unmoved) == (0, 4), "it still waits for the earlier layers first"


def test_workers_that_return_to_an_earlier_state_keep_the_newest_costs_of_its_model() -> None:
    earlier = Control(step=4, visit=1)
    old, new = Control(step=5, visit=1, costs={"seconds": 1}), Control(step=6, visit=1, costs={"seconds": 2})
    another_model = Control(step=7, visit=2, costs={"seconds": 3})
    earlier.return_with([new, old, another_model, Control(step=8, visit=1)])
    assert earlier.costs == {"seconds": 2}
    earlier.return_with([another_model, Control(step=8, visit=1)])
    assert earlier.costs == {"seconds": 2}


def test_the_step_at_which_layers_last_thawed_is_kept() -> None:
    control = Control(step=3)
    control.move_boundary(6)
    assert (control.boundary, control.boundary_step, control.fell_step) == (6, 3, Control().fell_step)
    control.step = 5
    control.move_boundary(6)
    assert control.fell_step == Control().fell_step
    control.move_boundary(4)
    assert (control.boundary, control.boundary_step, control.fell_step) == (4, 5, 5)
