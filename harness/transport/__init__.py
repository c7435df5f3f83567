"""How rows move between ranks: torch.distributed collectives, shared memory, or several ranks in one process."""
