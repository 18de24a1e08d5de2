"""Jobs that several tests submit."""

from tests.testkit.operator.builders import JobBuilder, make_job


def packing_job(name: str = "digits") -> JobBuilder:
    """Four stages that the freezes at steps 10 and 20 let shrink to two and to one; 30 steps.

    There are no nodes here, so a claim has to be tried.
    """
    points = [{"step": 10, "boundary": 8}, {"step": 20, "boundary": 11}]
    return (
        make_job(name)
        .stages(4)
        .workers(4)
        .drop("training.epochs")
        .set("training.steps", 30)
        .set("freeze", {"policy": "Explicit", "boundaries": points})
        .set("elasticPolicy.claimFrom", "Autoscaler")
    )
