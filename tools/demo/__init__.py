"""`make demo`: trains one job twice, unfrozen and freezing, and says what freezing saved and what it cost."""
