"""What a run leaves behind: steps, events, ledger, summary and a picture of who held which layers when."""

from .ledger import Ledger, audit
from .run import Role, RunRecord, clear

__all__ = ["Ledger", "Role", "RunRecord", "audit", "clear"]
