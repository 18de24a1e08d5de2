"""Process groups, connections and the watchdog over them."""
