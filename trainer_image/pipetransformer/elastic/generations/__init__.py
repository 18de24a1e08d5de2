"""How workers learn of a generation and meet in it: rendezvous, operator channel, standalone world."""
