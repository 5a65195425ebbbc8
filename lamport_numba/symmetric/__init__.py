"""Symmetric memory: one buffer a rank, each mapped into every other rank, set up so that nobody is stranded.

`communicator` is the rendezvous, `handles` the exchange of memory handles, `memory` the buffer, `multicast` the
address that reaches every rank, `transport` the choice between them.
"""
