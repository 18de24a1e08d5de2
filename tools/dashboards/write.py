"""Renders the dashboards to the chart's files."""

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import AnnotationPanelFilter

from tools.dashboards import fleet, job
from tools.devcluster.layout import REPOSITORY

FOLDER = REPOSITORY / "charts" / "pipetransformer" / "files" / "dashboards"


def rendered() -> dict[str, str]:
    """JSON of each dashboard by file name."""
    encoder = JSONEncoder(sort_keys=True, indent=1)
    built = {"fleet.json": fleet.dashboard().build(), "job.json": job.dashboard().build()}
    for board in built.values():
        for number, panel in enumerate(board.panels or [], 1):
            panel.id_val = number
        marked = [panel.id_val for panel in board.panels or [] if panel.title in job.MARKED and panel.id_val]
        for annotation in (board.annotations.list_val if board.annotations else None) or []:
            annotation.filter_val = AnnotationPanelFilter(ids=marked)
    return {name: encoder.encode(board) + "\n" for name, board in built.items()}
