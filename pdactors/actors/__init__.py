"""The actors: one process, one mailbox, one loop and one failure rule each."""
