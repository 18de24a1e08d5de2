"""How workers learn of a generation and meet in it: rendezvous, operator channel, run without an operator."""
