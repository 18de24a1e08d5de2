"""Process groups, their connections, the watchdog that ends waits on them, and small exchanges between workers."""
