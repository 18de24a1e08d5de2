"""The record of a run: steps, events, ledger, summary, and a picture of which worker held which layers when."""

from .cache_use import CacheLog
from .ledger import Ledger, audit
from .run import Role, RunRecord, newest_generation, set_aside

__all__ = ["CacheLog", "Ledger", "Role", "RunRecord", "audit", "newest_generation", "set_aside"]
