"""The cluster under a virtual clock: the real policies and books, with a cost model instead of engines and wires."""
