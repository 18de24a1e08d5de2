"""Workers as pods: rendering, placement, protection."""
