"""Decisions: placement, admission, batching, extents, liveness. Plain functions and small classes; no I/O, no clock."""
