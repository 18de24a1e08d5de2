"""Changes the layout of a job that trains, in three phases: prepare, commit, clean. One change at a time.

A layout that the present workers can run is published at once. For a larger one the operator first creates pods, and
the old layout trains until all of them are warm. The target is computed again at each turn, so it follows new reports.
"""

from pipetransformer_operator.plan.draft import Draft

from . import clean, commit, drain, prepare


def resize(draft: Draft) -> None:
    """Brings a training job closer to its best layout, unless members are lost or ending."""
    if not draft.view.all_alive:
        return
    if commit.advance(draft) or clean.advance(draft) or drain.replace(draft) or prepare.publish(draft):
        return
    prepare.prepare(draft)
