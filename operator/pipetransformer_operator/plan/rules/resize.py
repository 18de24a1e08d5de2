"""Changing the layout of a job that trains: prepare, commit, clean; one change at a time, recomputed at every turn.

A layout that the present workers can carry is published at once. For more workers pods are created, and the old layout
trains until all of them are warm. Events meanwhile are folded into the next change.
"""

from pipetransformer_operator.plan.draft import Draft

from . import clean, commit, drain, prepare


def resize(draft: Draft) -> None:
    """Moves a training job one step closer to its best layout, unless members are lost or ending."""
    if draft.status.generation is None or not draft.view.all_alive:
        return
    if commit.under_way(draft) or clean.under_way(draft) or drain.replace(draft) or prepare.publish(draft):
        return
    prepare.prepare(draft)
