"""KV memory: layout, arena, blocks, prefixes, leases. Bookkeeping only; no torch, no sockets, no clock."""
