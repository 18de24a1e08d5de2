"""What a run leaves behind: steps, events, ledger and summary."""

from .cache_use import CacheLog
from .ledger import Ledger, audit
from .run import Role, RunRecord, newest_generation, set_aside

__all__ = ["CacheLog", "Ledger", "Role", "RunRecord", "audit", "newest_generation", "set_aside"]
