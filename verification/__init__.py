"""A model of the protocol, searched over every interleaving: `python -m verification` (see docs/verification.md)."""
