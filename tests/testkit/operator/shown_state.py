"""The operator's state that metrics show (`OperatorState`), as plain values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from pipetransformer_contract.api import PipeTrainingJob
from pipetransformer_operator.channel.tls.certificate import Validity


@dataclass(frozen=True)
class ShownState:
    """See `OperatorState`."""

    known: Iterable[PipeTrainingJob] = ()
    leads: bool = True
    watches: Mapping[str, float] = field(default_factory=dict)
    connections: int = 0
    avoided_nodes: Mapping[str, datetime] = field(default_factory=dict)
    certificates: Mapping[str, Validity] = field(default_factory=dict)
    kueue_answers: bool | None = None

    def jobs(self) -> Iterable[PipeTrainingJob]:
        """See `ManagedJobs`."""
        return self.known
