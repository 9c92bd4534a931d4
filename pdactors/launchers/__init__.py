"""Who brings the nodes of a cluster file up: this machine's own launch, or Ray. Both keep one contract."""
